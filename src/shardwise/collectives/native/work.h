// What torch holds of an operation under way, and the order in which a group's operations run.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tensors.h"

namespace shardwise {

using c10d::OpType;
using c10d::Work;

class Handle : public Work {
 public:
  Handle(int rank, OpType type, Tensors outputs, uint64_t sequence)
      : Work(rank, type, nullptr), outputs_(std::move(outputs)), sequence_(sequence) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices_of({&outputs_}));
  }

  void complete(std::exception_ptr error, int source = -1) {
    source_ = source;
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(error);
  }

  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override { return source_; }
  void abort() override { TORCH_CHECK(false, "shardwise engine: a single operation cannot be aborted"); }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  uint64_t sequence_;
  int source_ = -1;
};

// Runs tasks one at a time in the order in which they came.
class Turns {
 public:
  using Task = std::function<void()>;

  ~Turns() { stop(); }

  void run(Task task, bool on_this_thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!stopping_, "shardwise engine: the group has been destroyed");
    if (on_this_thread && !busy_ && tasks_.empty()) {
      busy_ = true;
      lock.unlock();
      task();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
      return;
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !busy_ && (stopping_ || !tasks_.empty()); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      task = nullptr;  // lets go of its tensors
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::thread thread_;
  bool busy_ = false, stopping_ = false;
};

}  // namespace shardwise
