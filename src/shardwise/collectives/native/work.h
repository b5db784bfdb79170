// What torch holds of an operation under way.
#pragma once

#include <functional>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tensors.h"

namespace shardwise {

using c10::ivalue::Future;
using c10d::OpType;
using c10d::Work;

// The name of an operation in a profiler's trace; those of Gloo's with this backend's name.
inline const char* title(OpType type) {
  switch (type) {
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::ALLGATHER_COALESCED: return "shardwise:all_gather";
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE: return "shardwise:reduce_scatter";
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED: return "shardwise:all_reduce";
    case OpType::_ALLREDUCE_SPARSE: return "shardwise:sparse_all_reduce";
    case OpType::BROADCAST: return "shardwise:broadcast";
    case OpType::REDUCE: return "shardwise:reduce";
    case OpType::GATHER: return "shardwise:gather";
    case OpType::SCATTER: return "shardwise:scatter";
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE: return "shardwise:all_to_all";
    case OpType::BARRIER: return "shardwise:barrier";
    case OpType::SEND: return "shardwise:send";
    case OpType::RECV: return "shardwise:recv";
    case OpType::RECVANYSOURCE: return "shardwise:recvAnySource";
    default: return "shardwise:coalesced";
  }
}

// A future is made when somebody asks for it.
class Handle : public Work {
 public:
  Handle(int rank, OpType type, Tensors outputs, const Tensors& read, uint64_t sequence)
      : Work(rank, type, title(type), read), outputs_(std::move(outputs)), sequence_(sequence) {}

  // Ends it. Returns what completes its future and runs the callbacks of that; nothing where none has been asked for.
  [[nodiscard]] std::function<void()> complete(std::exception_ptr error, int source = -1) {
    {
      std::lock_guard<std::mutex> lock(asking_);
      source_ = source;
      error_ = error;
      over_ = true;
      if (future_) {
        return [self = c10::intrusive_ptr<Handle>::unsafe_reclaim_from_nonowning(this)] { self->tell(); };
      }
    }
    finish(error);
    return nullptr;
  }

  c10::intrusive_ptr<Future> getFuture() override {
    std::lock_guard<std::mutex> lock(asking_);
    if (future_) return future_;
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), devices_of({&outputs_}));
    if (over_) {
      tell();
    } else {
      // The first callback: whoever has waited for this work finds its future done, and waits for no other callback.
      future_->addCallback([this](Future&) { finish(error_); }, false);
    }
    return future_;
  }

  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override { return source_; }
  void abort() override { TORCH_CHECK(false, "shardwise engine: a single operation cannot be aborted"); }

 private:
  void tell() { error_ ? future_->setError(error_) : future_->markCompleted(c10::IValue(outputs_)); }

  Tensors outputs_;
  std::mutex asking_;
  c10::intrusive_ptr<Future> future_;
  std::exception_ptr error_;
  uint64_t sequence_;
  int source_ = -1;
  bool over_ = false;
};

// Several operations as one, which is over when all are.
class Coalesced : public Work {
 public:
  Coalesced(int rank, std::vector<c10::intrusive_ptr<Work>> parts) : Work(rank, OpType::COALESCED), parts_(std::move(parts)) {}

  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& part : parts_) part->wait(timeout);
    return true;
  }
  Tensors result() override {
    Tensors all;
    for (const auto& part : parts_) {
      for (const Tensor& tensor : part->result()) all.push_back(tensor);
    }
    return all;
  }
  c10::intrusive_ptr<Future> getFuture() override {
    c10::List<c10::intrusive_ptr<Future>> futures(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& part : parts_) futures.push_back(part->getFuture());
    const auto tensors = [all = result()](Future& done) {
      done.value();  // raises what a part has raised
      return c10::IValue(all);
    };
    return c10::collectAll(futures)->then(tensors, c10::ListType::create(c10::TensorType::get()));
  }

 private:
  std::vector<c10::intrusive_ptr<Work>> parts_;
};

}  // namespace shardwise
