// The glue between torch.distributed and the engine: a c10d backend, compiled against torch. Nothing is computed here.
//
// An operation that its caller waits for anyway runs on the caller's own thread; an asynchronous one runs on the group's
// worker thread. Both take their turn in the order of the calls.
#include <map>
#include <mutex>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include "membership.h"
#include "monitored_barrier.h"
#include "sparse.h"
#include "tensors.h"
#include "work.h"

namespace shardwise {
namespace {

using StorePointer = c10::intrusive_ptr<c10d::Store>;

class Engine : public c10d::Backend {
 public:
  Engine(StorePointer store, Places places, std::vector<int> names, Network network, Milliseconds timeout)
      : Backend(places.rank, places.size()), store_(std::move(store)), places_(std::move(places)), names_(std::move(names)),
        network_(std::move(network)), timeout_(timeout), own_(meet({*store_, places_, names_, network_, timeout}), places_, names_) {}

  const std::string getBackendName() const override { return "shardwise"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }

  c10::intrusive_ptr<Backend::Options> getBackendOptions() override {
    auto options = c10::make_intrusive<Backend::Options>(getBackendName(), timeout_);
    options->global_ranks_in_group.assign(names_.begin(), names_.end());
    return options;
  }

  // What was called before is still carried out.
  void shutdown() override { own_.leave(); }

  // Every waiting operation of the group ends with an error, on all ranks.
  void abort() override {
    try {
      if (!own_.is_of_parent()) own_->peers().fail("rank " + own_->peers().called(rank_) + " aborted the group");
    } catch (const Failure&) {  // which the waiting operations raise
    }
    shutdown();
  }

  bool supportsSplitting() const override { return true; }

  // A group of some of the ranks; all of those call it. torch splits a group once for each device that it knows.
  c10::intrusive_ptr<Backend> split(const StorePointer& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Backend::Options>& options) override {
    std::vector<int> names;
    int own = -1;
    for (size_t i = 0; i < ranks.size(); ++i) {
      names.push_back(names_.at(ranks[i]));
      if (ranks[i] == rank_) own = static_cast<int>(i);
    }
    TORCH_CHECK(own >= 0, "shardwise engine: rank ", rank_, " is none of the ranks of the new group");
    std::vector<std::vector<int>> hosts;
    for (const std::vector<int>& host : places_.hosts) {
      std::vector<int> here;
      for (size_t i = 0; i < ranks.size(); ++i) {
        if (std::find(host.begin(), host.end(), ranks[i]) != host.end()) here.push_back(static_cast<int>(i));
      }
      if (!here.empty()) hosts.push_back(std::move(here));
    }
    const auto part = c10::make_intrusive<c10d::PrefixStore>("split" + std::to_string(splits_[ranks]++), store);
    return c10::make_intrusive<Engine>(part, Places(own, hosts), names, network_, options ? options->timeout : timeout_);
  }

  bool supportsShrinking() const override { return true; }

  // A group without those ranks, which may be dead; all others call it. The one flag ends what waits in this group.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                     const c10::intrusive_ptr<Options>& options) override {
    if (shrink_flags != 0) abort();
    std::vector<int> rest;
    for (int rank = 0; rank < size_; ++rank) {
      const bool stays = std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) == ranks_to_exclude.end();
      if (stays) rest.push_back(rank);
    }
    return split(c10::make_intrusive<c10d::PrefixStore>("shrunk", store_), rest, options);
  }

  // Nothing is collected: what is called between the two runs as it would alone.
  void startCoalescing() override { coalesced_.emplace(); }
  c10::intrusive_ptr<Work> endCoalescing() override {
    TORCH_CHECK(coalesced_, "shardwise engine: there was no start of what is coalesced");
    auto work = c10::make_intrusive<Coalesced>(rank_, std::move(*coalesced_));
    coalesced_.reset();
    return work;
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const Tensors& list = only_list(outputs, size_);
    check_alike(list, only(inputs));
    return gather_all(OpType::ALLGATHER, {{list, inputs[0]}}, options);
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return gather_all(OpType::_ALLGATHER_BASE, {{{output}, input}}, options);
  }

  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "shardwise engine: as many outputs as inputs are expected");
    std::vector<Gathering> all;
    for (size_t i = 0; i < inputs.size(); ++i) all.push_back({{outputs[i]}, inputs[i]});
    return gather_all(OpType::ALLGATHER_COALESCED, all, options);
  }

  // Here the lists are by rank: outputs[rank][i] is what `rank` has in inputs[i].
  c10::intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "shardwise engine: one list a rank is expected");
    std::vector<Gathering> all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors list;
      for (const Tensors& of_rank : outputs) list.push_back(of_rank.at(i));
      check_alike(list, inputs[i]);
      all.push_back({list, inputs[i]});
    }
    return gather_all(OpType::ALLGATHER_COALESCED, all, options);
  }

  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    const Tensors& list = only_list(inputs, size_);
    const auto is_unlike = [&](const Tensor& tensor) { return tensor.numel() != list[0].numel(); };
    if (std::any_of(list.begin(), list.end(), is_unlike)) return scatter_uneven_sums(list, only(outputs), options);
    check_alike(list, only(outputs));
    return scatter_sums(OpType::REDUCE_SCATTER, {{list, outputs[0]}}, options);
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, {{{input}, output}}, options);
  }

  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "shardwise engine: as many outputs as inputs are expected");
    std::vector<Gathering> all;
    for (size_t i = 0; i < inputs.size(); ++i) all.push_back({{inputs[i]}, outputs[i]});
    return scatter_sums(OpType::COALESCED, all, options);
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!tensors.empty() && tensors[0].is_sparse()) return reduce_sparse(only(tensors), options);
    return reduce_all(OpType::ALLREDUCE, tensors, options);
  }

  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Call call = call_of(Kind::broadcast, only(tensors), tensors[0].numel(), rooted(options.rootRank));
    const bool is_root = call.root == rank_;
    auto run = [&group = own_->group(), call, is_root, outputs = Outputs(tensors, is_root)](int64_t timeout) mutable {
      group.broadcast(call, outputs.written[0].data_ptr(), timeout);
      if (!is_root) outputs.put_back();
    };
    return enqueue(OpType::BROADCAST, tensors, tensors, devices_of({&tensors}), options, std::move(run));
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Call call =
        with(call_of(Kind::reduce, only(tensors), tensors[0].numel(), rooted(options.rootRank)), options.reduceOp);
    const bool is_root = call.root == rank_;
    auto run = [&group = own_->group(), call, is_root, outputs = Outputs(tensors, true)](int64_t timeout) mutable {
      group.reduce(call, outputs.written[0].const_data_ptr(), outputs.written[0].data_ptr(), timeout);
      if (is_root) outputs.put_back();
    };
    return enqueue(OpType::REDUCE, tensors, tensors, devices_of({&tensors}), options, std::move(run));
  }

  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Call call = call_of(Kind::gather, only(inputs), inputs[0].numel(), rooted(options.rootRank));
    const Tensors list = rank_ == call.root ? only_list(outputs, size_) : Tensors{};
    check_alike(list, inputs[0]);
    auto run = [&group = own_->group(), call, input = readable(inputs[0]), made = Outputs(list)](int64_t timeout) mutable {
      group.gather(call, input.const_data_ptr(), pointers(made.written), timeout);
      made.put_back();
    };
    return enqueue(OpType::GATHER, list, inputs, devices_of({&list, &inputs}), options, std::move(run));
  }

  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const Call call = call_of(Kind::scatter, only(outputs), outputs[0].numel(), rooted(options.rootRank));
    const Tensors list = rank_ == call.root ? only_list(inputs, size_) : Tensors{};
    check_alike(list, outputs[0]);
    auto run = [&group = own_->group(), call, given = readable(list), made = Outputs(outputs)](int64_t timeout) mutable {
      group.scatter(call, const_pointers(given), made.written[0].data_ptr(), timeout);
      made.put_back();
    };
    return enqueue(OpType::SCATTER, outputs, list, devices_of({&outputs, &list}), options, std::move(run));
  }

  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "shardwise engine: all_to_all needs one dtype");
    const Tensor given = readable(input);
    Outputs made({output});
    const auto inputs = pieces_of(given, input_sizes, size_), outputs = pieces_of(made.written[0], output_sizes, size_);
    const Call call = call_of(Kind::all_to_all, input, 0);
    const Tensors all{output, input};
    auto run = [&group = own_->group(), call, given, inputs, outputs, made](int64_t timeout) mutable {
      group.all_to_all(call, inputs, outputs, timeout);  // `given` and `made` keep their memory
      made.put_back();
    };
    return enqueue(OpType::ALLTOALL_BASE, {output}, {input}, devices_of({&all}), options, std::move(run));
  }

  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const size_t ranks = static_cast<size_t>(size_);
    TORCH_CHECK(inputs.size() == ranks && outputs.size() == ranks, "shardwise engine: all_to_all needs one tensor a rank");
    const Tensors given = readable(inputs);
    const Outputs made(outputs);
    std::vector<Piece> from, to;
    for (const Tensor& tensor : given) from.push_back({tensor.data_ptr(), tensor.nbytes()});
    for (const Tensor& tensor : made.written) to.push_back({tensor.data_ptr(), tensor.nbytes()});
    const Call call = call_of(Kind::all_to_all, inputs[0], 0);
    auto run = [&group = own_->group(), call, given, from, to, made](int64_t timeout) mutable {
      group.all_to_all(call, from, to, timeout);  // `given` and `made` keep their memory
      made.put_back();
    };
    return enqueue(OpType::ALLTOALL, outputs, inputs, devices_of({&outputs, &inputs}), options, std::move(run));
  }

  // An all-to-all of the rows at `from` of `input` to those at `to` of `output`; sizes are rows of each rank.
  c10::intrusive_ptr<Work> exchange_rows(const Tensor& output, const std::optional<Tensor>& to, const std::vector<int64_t>& output_sizes,
                                         const Tensor& input, const std::optional<Tensor>& from, const std::vector<int64_t>& input_sizes,
                                         bool async) {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "shardwise engine: all_to_all needs one dtype");
    const auto inputs = pieces_at(input, from, input_sizes, size_), outputs = pieces_at(output, to, output_sizes, size_);
    const Call call = call_of(Kind::all_to_all, input, 0);
    auto run = [&group = own_->group(), call, inputs, outputs, input, from, output, to](int64_t timeout) {
      group.all_to_all(call, inputs, outputs, timeout);  // the tensors keep their memory
    };
    c10d::AllToAllOptions options;
    options.asyncOp = async;
    return enqueue(OpType::ALLTOALL_BASE, {output}, {input}, {}, options, std::move(run));
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    const int64_t timeout = nanoseconds(options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout);
    ++calls_;
    translated([&] { MonitoredBarrier(*own_->messenger(), names_, timeout).run(rank_, wait_all_ranks); });
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    Call call{};
    call.kind = Kind::barrier;
    call.reduce = Reduce::none;
    call.root = -1;
    call.label = current_label;
    std::vector<c10::Device> devices;
    if (options.device && !options.device->is_cpu()) devices.push_back(*options.device);
    auto run = [&group = own_->group(), call](int64_t timeout) { group.barrier(call, timeout); };
    return enqueue(OpType::BARRIER, {}, {}, devices, options, std::move(run));
  }

  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    const Tensor data = readable(only(tensors));
    Earlier(devices_of({&tensors})).wait();
    const auto work = c10::make_intrusive<Handle>(rank_, OpType::SEND, tensors, tensors, calls_);
    const auto done = [work, data](std::exception_ptr error, int) { end(*work, error); };
    translated([&] {
      own_->messenger()->send(peer(to), tag, dtype(data), data.const_data_ptr(), data.nbytes(), nanoseconds(timeout_), done);
    });
    note(work);
    return work;
  }

  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return receive(OpType::RECV, tensors, peer(from), tag);
  }

  c10::intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    return receive(OpType::RECVANYSOURCE, tensors, -1, tag);
  }

 private:
  struct Gathering {
    Tensors parts;  // one a rank, or one buffer of all
    Tensor own;
  };

  static int64_t nanoseconds(Milliseconds time) { return std::chrono::nanoseconds(time).count(); }
  static int32_t dtype(const Tensor& tensor) { return static_cast<int32_t>(tensor.scalar_type()); }

  static std::exception_ptr as_torch(std::exception_ptr error) {
    if (!error) return error;
    try {
      translated([&] { std::rethrow_exception(error); });
    } catch (...) {
      return std::current_exception();
    }
    return error;
  }

  int64_t rooted(int64_t root) const {
    TORCH_CHECK(root >= 0 && root < size_, "shardwise engine: root ", root, " is none of the ", size_, " ranks");
    return root;
  }

  int peer(int other) const {
    TORCH_CHECK(other >= 0 && other < size_ && other != rank_, "shardwise engine: rank ", other, " is not another rank");
    return other;
  }

  // Of a message, which no other operation waits for: nor do they for its callbacks.
  static void end(Handle& work, std::exception_ptr error, int source = -1) {
    auto callbacks = work.complete(as_torch(error), source);
    if (callbacks) ThreadPool::of_process().run(std::move(callbacks));
  }

  c10::intrusive_ptr<Work> receive(OpType type, Tensors& tensors, int from, int tag) {
    const auto made = std::make_shared<Outputs>(Tensors{only(tensors)});
    const auto work = c10::make_intrusive<Handle>(rank_, type, tensors, tensors, calls_);
    const auto done = [work, made, earlier = Earlier(devices_of({&tensors}))](std::exception_ptr error, int source) {
      try {
        if (!error) earlier.wait();
        if (!error) made->put_back();
      } catch (...) {
        error = std::current_exception();
      }
      end(*work, error, source);
    };
    const Tensor& to = made->written[0];
    translated([&] {
      own_->messenger()->receive(from, tag, dtype(to), to.data_ptr(), to.nbytes(), nanoseconds(timeout_), done);
    });
    note(work);
    return work;
  }

  // Each of a coalesced call is an operation of its own.
  c10::intrusive_ptr<Work> gather_all(OpType type, const std::vector<Gathering>& all, const c10d::AllgatherOptions& options) {
    Tensors results, inputs;
    std::vector<std::function<void(int64_t)>> steps;
    for (const Gathering& each : all) {
      results.insert(results.end(), each.parts.begin(), each.parts.end());
      inputs.push_back(each.own);
      Outputs made(each.parts);
      const Tensors parts = each.parts.size() == 1 ? parts_of(made.written[0], size_) : made.written;
      check_alike(parts, each.own);
      const Call call = call_of(Kind::all_gather, each.own, each.own.numel());
      steps.push_back([&group = own_->group(), call, input = readable(each.own), parts, made](int64_t timeout) mutable {
        group.all_gather(call, input.const_data_ptr(), pointers(parts), timeout);
        made.put_back();
      });
    }
    return enqueue(type, results, inputs, devices_of({&results, &inputs}), options, in_turn(std::move(steps)));
  }

  c10::intrusive_ptr<Work> scatter_sums(OpType type, const std::vector<Gathering>& all, const c10d::ReduceScatterOptions& options) {
    Tensors results, inputs;
    std::vector<std::function<void(int64_t)>> steps;
    for (const Gathering& each : all) {
      results.push_back(each.own);
      inputs.insert(inputs.end(), each.parts.begin(), each.parts.end());
      const Tensors given = readable(each.parts), parts = given.size() == 1 ? parts_of(given[0], size_) : given;
      check_alike(parts, each.own);
      const Call call = with(call_of(Kind::reduce_scatter, each.own, each.own.numel()), options.reduceOp);
      steps.push_back([&group = own_->group(), call, parts, made = Outputs({each.own})](int64_t timeout) mutable {
        group.reduce_scatter(call, const_pointers(parts), made.written[0].data_ptr(), timeout);
        made.put_back();
      });
    }
    return enqueue(type, results, inputs, devices_of({&results, &inputs}), options, in_turn(std::move(steps)));
  }

  c10::intrusive_ptr<Work> reduce_all(OpType type, const Tensors& tensors, const c10d::AllreduceOptions& options) {
    std::vector<std::function<void(int64_t)>> steps;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Call call = with(call_of(Kind::all_reduce, tensors[i], tensors[i].numel()), options.reduceOp);
      steps.push_back([&group = own_->group(), call, made = Outputs(tensors[i], tensors, i)](int64_t timeout) mutable {
        group.all_reduce(call, made.written[0].const_data_ptr(), made.written[0].data_ptr(), timeout);
        made.put_back();
      });
    }
    return enqueue(type, tensors, tensors, devices_of({&tensors}), options, in_turn(std::move(steps)));
  }

  c10::intrusive_ptr<Work> reduce_sparse(const Tensor& tensor, const c10d::AllreduceOptions& options) {
    auto run = [&group = own_->group(), size = size_, sum = SparseSum(tensor, options.reduceOp)](int64_t timeout) {
      sum.run(group, size, timeout);
    };
    return enqueue(OpType::_ALLREDUCE_SPARSE, {tensor}, {tensor}, {}, options, std::move(run));
  }

  // Parts of unequal sizes: each rank is sent what it adds, and adds it in the order of the ranks.
  c10::intrusive_ptr<Work> scatter_uneven_sums(const Tensors& list, const Tensor& output, const c10d::ReduceScatterOptions& options) {
    for (const Tensor& tensor : list) {
      TORCH_CHECK(tensor.scalar_type() == output.scalar_type(), "shardwise engine: reduce_scatter needs one dtype");
    }
    check_alike({list[rank_]}, output);
    Call call = with(call_of(Kind::all_to_all, output, output.numel()), options.reduceOp);
    Tensors given = readable(list);
    Types types{call.number, call.number};
    if (call.reduce == Reduce::scaled_sum) {
      types.from = accumulator(call.number);  // scaled in it, so that only the sum is rounded
      for (Tensor& tensor : given) tensor = tensor.to(c10::promoteTypes(tensor.scalar_type(), at::kFloat)) * call.factor;
      call.reduce = Reduce::sum;
    }
    const Tensor received = at::empty({size_, output.numel()}, given[rank_].options().requires_grad(false));
    std::vector<Piece> from, to;
    for (int peer = 0; peer < size_; ++peer) {
      from.push_back({given[peer].data_ptr(), given[peer].nbytes()});
      to.push_back({received[peer].data_ptr(), received[peer].nbytes()});
    }
    auto run = [&group = own_->group(), call, types, given, received, from, to, made = Outputs({output})](int64_t timeout) mutable {
      group.all_to_all(call, from, to, timeout);  // `given` and `received` keep their memory
      std::vector<const void*> parts;
      for (const Piece& piece : to) parts.push_back(piece.data);
      const std::vector<double> factors(parts.size(), 1.0);
      void* const sum = made.written[0].data_ptr();
      shardwise::reduce(types, call.reduce, sum, parts, factors, call.count, parts.size());
      made.put_back();
    };
    return enqueue(OpType::REDUCE_SCATTER, {output}, list, devices_of({&list}), options, std::move(run));
  }

  static std::function<void(int64_t)> in_turn(std::vector<std::function<void(int64_t)>> steps) {
    return [steps = std::move(steps)](int64_t timeout) mutable {
      for (auto& step : steps) step(timeout);
    };
  }

  // `devices` hold tensors of the call, which are copied to the host by now or will be when what they have queued is done.
  // A profiler's trace has the shapes of `inputs`.
  template <class Options>
  c10::intrusive_ptr<Work> enqueue(OpType type, Tensors outputs, const Tensors& inputs, const std::vector<c10::Device>& devices,
                                   const Options& options, std::function<void(int64_t)> run) {
    const int64_t timeout = nanoseconds(options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout);
    auto work = c10::make_intrusive<Handle>(rank_, type, std::move(outputs), inputs, ++calls_);
    auto task = [work, timeout, earlier = Earlier(devices), run = std::move(run)]() mutable {
      std::exception_ptr error;
      try {
        earlier.wait();
        translated([&] { run(timeout); });
      } catch (...) {
        error = std::current_exception();
      }
      run = nullptr;
      return work->complete(error);
    };
    translated([&] { own_->turns().run(std::move(task), !options.asyncOp); });
    note(work);
    return work;
  }

  // Of an operation that belongs to what is being coalesced.
  void note(const c10::intrusive_ptr<Work>& work) {
    if (coalesced_) coalesced_->push_back(work);
  }

  const StorePointer store_;
  const Places places_;
  const std::vector<int> names_;
  const Network network_;
  Milliseconds timeout_;
  std::atomic<uint64_t> calls_{0};
  std::map<std::vector<int>, int> splits_;  // how often these ranks were
  std::optional<std::vector<c10::intrusive_ptr<Work>>> coalesced_;
  Ticket own_;
};

c10::intrusive_ptr<c10d::Backend> make(const StorePointer& store, int rank,
                                       const std::vector<std::vector<int>>& hosts, const std::vector<int>& names,
                                       const std::string& interface, const std::string& host, const std::string& port,
                                       std::chrono::duration<float> timeout) {
  const auto patience = std::chrono::duration_cast<Milliseconds>(timeout);
  return c10::make_intrusive<Engine>(store, Places(rank, hosts), names, Network{interface, host, port}, patience);
}

// Why this machine cannot make shared memory for a group; empty where it can.
std::string obstacle() {
  try {
    const uint64_t token[2] = {1, 2};
    const Room room(Room::create(2, token), 0, 2, token, {0, 1});
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

// Ends all groups of this process before the interpreter does; what is under way has so many seconds.
void leave_all(double seconds) {
  Memberships::of_process().leave_all(static_cast<int64_t>(seconds * static_cast<double>(kNanoseconds)));
}

}  // namespace
}  // namespace shardwise

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using shardwise::Engine;
  py::class_<Engine, c10d::Backend, c10::intrusive_ptr<Engine>>(m, "Engine")
      .def_property_readonly("options", &Engine::getBackendOptions)
      .def("exchange_rows", &Engine::exchange_rows, py::call_guard<py::gil_scoped_release>());
  m.def("make", &shardwise::make, py::call_guard<py::gil_scoped_release>());
  m.def("obstacle", &shardwise::obstacle);
  m.def("set_label", &shardwise::set_label);
  m.def("tell_failure", [](const std::string& text) { shardwise::Memberships::of_process().tell_failure(text); });
  m.def("leave_all", &shardwise::leave_all, py::call_guard<py::gil_scoped_release>());
}
