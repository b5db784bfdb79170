// The order in which a group's operations run: that of the calls, but what an operation's callbacks call comes right after
// it, before the next one.
//
// Else callbacks of several operations would start others in the order in which a rank's threads get to them, which is
// another one on each rank. A callback that sleeps for `kPatience` while operations wait for it is left to itself: it may
// wait for one of those.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "room.h"
#include "thread_pool.h"

namespace shardwise {

// True where this thread carries out an operation, runs its callbacks or moves messages: it cannot wait for that to end.
inline thread_local bool on_engine_thread = false;

// The thread that makes it, as others see it while it runs.
class WatchedThread {
 public:
  WatchedThread() : thread_(static_cast<int>(syscall(SYS_gettid))) { pthread_getcpuclockid(pthread_self(), &clock_); }

  // Nanoseconds of a processor that the thread has had.
  int64_t spent() const {
    timespec time{};
    clock_gettime(clock_, &time);
    return time.tv_sec * kNanoseconds + time.tv_nsec;
  }

  // False where it runs or would if there were a core for it.
  bool sleeps() const {
    char text[256] = {};
    std::snprintf(text, sizeof text, "/proc/self/task/%d/stat", thread_);
    std::FILE* const file = std::fopen(text, "r");
    if (file == nullptr) return false;
    const size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[length] = 0;
    const char* const name_end = std::strrchr(text, ')');  // the state is the word after the name
    return name_end != nullptr && std::strncmp(name_end, ") S", 3) == 0;
  }

 private:
  int thread_;
  clockid_t clock_{};
};

// Runs tasks one at a time.
class Turns : public std::enable_shared_from_this<Turns> {
 public:
  using Callbacks = std::function<void()>;  // those of a task, in their order; empty where it has none
  using Task = std::function<Callbacks()>;

  // On the caller's thread where it waits anyway and nothing is before it. Throws Failure once they are stopped, but for
  // what callbacks call of tasks that came before.
  void run(Task task, bool on_this_thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Level> level = level_of_this_thread();
    if (stopping_ && level == levels_.front()) throw Failure("shardwise engine: the group has been destroyed");
    const bool is_next = level == levels_.back() && !level->busy && level->tasks.empty();
    if (on_this_thread && is_next) {
      level->busy = true;
      if (!carry_out(std::move(task), lock)) return;
      level->busy = false;
      changed_.notify_all();
    } else {
      level->tasks.push_back(std::move(task));
    }
    start();
    watch();
  }

  // After what came before, on whichever thread that runs. Not inside of a task.
  void stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    watch();
    changed_.wait(lock, [&] { return rests(); });
  }

  // From now on no callbacks are waited for.
  void leave_callbacks() {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }

  bool rest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return rests();
  }

 private:
  static constexpr int64_t kPatience = kNanoseconds;
  static constexpr std::chrono::milliseconds kLook{20};

  // Tasks that were called outside of callbacks, or by those of one task. All but the innermost level are busy.
  struct Level {
    std::deque<Task> tasks;
    bool busy = false;       // a thread carries out one of them or runs its callbacks
    bool abandoned = false;  // the level below has gone on
    WatchedThread thread;    // that runs the callbacks
  };

  bool rests() const { return levels_.size() == 1 && !levels_[0]->busy && levels_[0]->tasks.empty(); }

  const std::shared_ptr<Level>& level_of_this_thread() const {
    for (const auto& level : levels_) {
      if (level.get() == calling_back) return level;
    }
    return levels_.front();
  }

  // Has a thread carry out the innermost tasks, where there are some and none does.
  void start() {
    const std::shared_ptr<Level>& level = levels_.back();
    if (level->busy || level->tasks.empty()) return;
    level->busy = true;
    ThreadPool::of_process().run([turns = shared_from_this(), level] { turns->work(*level); });
  }

  void work(Level& level) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!level.tasks.empty()) {
      Task task = std::move(level.tasks.front());
      level.tasks.pop_front();
      if (!carry_out(std::move(task), lock)) return;
    }
    level.busy = false;
    changed_.notify_all();
  }

  // Returns whether this thread is still the one that carries out the level's tasks.
  bool carry_out(Task task, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    const bool before = std::exchange(on_engine_thread, true);
    Callbacks callbacks = task();
    task = nullptr;  // lets go of its tensors
    lock.lock();
    const bool goes_on = !callbacks || call_back(std::move(callbacks), lock);
    on_engine_thread = before;
    return goes_on;
  }

  bool call_back(Callbacks callbacks, std::unique_lock<std::mutex>& lock) {
    const auto level = std::make_shared<Level>();
    levels_.push_back(level);
    watch();
    lock.unlock();
    const void* const before = std::exchange(calling_back, level.get());
    callbacks();
    callbacks = nullptr;
    calling_back = before;
    lock.lock();
    if (level->abandoned) return false;
    changed_.wait(lock, [&] { return !level->busy && level->tasks.empty(); });
    levels_.pop_back();
    changed_.notify_all();
    return true;
  }

  // Has a thread look after callbacks that somebody waits for.
  void watch() {
    if (watched_ || levels_.size() == 1 || !is_awaited()) return;
    watched_ = true;
    ThreadPool::of_process().run([turns = shared_from_this()] { turns->look_after_callbacks(); });
  }

  bool is_awaited() const {
    const auto waits = [&](const auto& level) { return level != levels_.back() && !level->tasks.empty(); };
    return stopping_ || std::any_of(levels_.begin(), levels_.end(), waits);
  }

  void look_after_callbacks() {
    std::unique_lock<std::mutex> lock(mutex_);
    std::shared_ptr<Level> innermost;
    int64_t spent = 0, since = 0;
    while (levels_.size() > 1) {
      const std::shared_ptr<Level>& level = levels_.back();
      const int64_t spent_now = level->thread.spent();
      const bool is_idle = is_awaited() && !level->busy && level->tasks.empty();
      const bool sleeps_on = is_idle && level == innermost && spent_now == spent && level->thread.sleeps();
      if (!sleeps_on) {
        since = now();
        spent = spent_now;
        innermost = level;
      }
      if (is_idle && (ending_ || now() - since > kPatience)) abandon();
      lock.unlock();
      std::this_thread::sleep_for(kLook);
      lock.lock();
    }
    watched_ = false;
  }

  // Goes on without the end of the innermost callbacks.
  void abandon() {
    levels_.back()->abandoned = true;
    levels_.pop_back();
    levels_.back()->busy = false;
    start();
    changed_.notify_all();
  }

  inline static thread_local const void* calling_back = nullptr;  // the level whose callbacks this thread runs

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Level>> levels_{std::make_shared<Level>()};
  bool stopping_ = false, ending_ = false, watched_ = false;
};

}  // namespace shardwise
