// Threads for operations of groups and for callbacks of futures. There are as many as run at once: a callback may wait for
// an operation that it has started, or for the interpreter's lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "wait.h"

namespace shardwise {

class ThreadPool {
 public:
  using Task = std::function<void()>;

  // Those of this process; never destroyed, since threads may outlive every static object.
  static ThreadPool& of_process() { return *process(); }
  // In the child of a fork, which has none of its parent's threads.
  static void forget_parents() { process() = new ThreadPool; }

  void run(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
    tasks_.push_back(std::move(task));
    kept_ = kIdle;
    if (idle_ >= tasks_.size()) return changed_.notify_one();
    std::thread([this] { work(); }).detach();
    ++threads_;
  }

  // Lets idle threads go, where nothing is expected any more.
  void release() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      kept_ = 0;
    }
    changed_.notify_all();
  }

  // Waits until nothing runs, up to that time. Afterwards nothing starts any more.
  void end(int64_t until) {
    while (now() < until && !rests()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    tasks_.clear();
  }

 private:
  static constexpr size_t kIdle = 4;

  static ThreadPool*& process() {
    static ThreadPool* all = new ThreadPool;
    return all;
  }

  bool rests() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && idle_ == threads_;
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      changed_.wait(lock, [&] { return !tasks_.empty() || idle_ > kept_; });
      --idle_;
      if (tasks_.empty()) break;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
    --threads_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t idle_ = 0, threads_ = 0, kept_ = kIdle;
  bool ended_ = false;
};

}  // namespace shardwise
