// The order in which a group's operations run.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "room.h"

namespace shardwise {

// True where this thread carries out an operation or moves messages: it cannot wait for that to end.
inline thread_local bool on_engine_thread = false;

// Runs tasks one at a time in the order in which they came.
class Turns {
 public:
  using Task = std::function<void()>;

  ~Turns() { stop(); }

  // On the caller's thread where it waits anyway and nothing is before it. Throws Failure once they are stopped.
  void run(Task task, bool on_this_thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopping_) throw Failure("shardwise engine: the group has been destroyed");
    if (on_this_thread && !busy_ && tasks_.empty()) {
      carry_out(task, lock);
      return;
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  // After what came before, on whichever thread that runs. Not inside of a task.
  void stop() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !busy_ && tasks_.empty(); });
    }
    if (thread_.joinable()) thread_.join();
  }

  bool rest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !busy_ && tasks_.empty();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !busy_ && (stopping_ || !tasks_.empty()); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      carry_out(task, lock);
    }
  }

  void carry_out(Task& task, std::unique_lock<std::mutex>& lock) {
    busy_ = true;
    lock.unlock();
    const bool before = std::exchange(on_engine_thread, true);
    task();
    task = nullptr;  // lets go of its tensors
    on_engine_thread = before;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::thread thread_;
  bool busy_ = false, stopping_ = false;
};

}  // namespace shardwise
