// The memory of the host in which an operation reads and writes, whatever device its tensors are on.
//
// A tensor of the CPU whose elements lie one after the other is used where it is. Any other has a copy; that of a
// device's tensor is in pinned memory, which torch keeps for reuse. Nothing here is CUDA's own: streams and events are
// those of whichever device torch has.
//
// The order: what a call reads is copied on the caller's current stream, after what was queued there. Before the
// operation runs, the host waits for that stream, so inputs are there and nobody uses the outputs any more. After it,
// results are copied on a stream of their own, and the call is done when they have arrived. So `wait`, futures and
// their callbacks need no stream to wait for another.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardwise {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline void check_dense(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "shardwise engine: only dense tensors can be sent, not ", tensor.layout());
}

// The devices other than the CPU that hold these tensors.
inline std::vector<c10::Device> devices_of(std::initializer_list<const Tensors*> lists) {
  std::vector<c10::Device> found;
  for (const Tensors* list : lists) {
    for (const Tensor& tensor : *list) {
      const c10::Device device = tensor.device();
      if (!device.is_cpu() && std::find(found.begin(), found.end(), device) == found.end()) found.push_back(device);
    }
  }
  return found;
}

// What devices had queued when an operation was called, which has to be done before it runs.
class Earlier {
 public:
  Earlier() = default;
  explicit Earlier(const std::vector<c10::Device>& devices) {
    for (const c10::Device device : devices) {
      events_.push_back(std::make_shared<c10::Event>(device.type()));
      events_.back()->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
  void wait() const {
    for (const auto& event : events_) event->synchronize();
  }

 private:
  std::vector<std::shared_ptr<c10::Event>> events_;  // shared: a task is copied
};

inline Tensor pinned_like(const Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true).requires_grad(false));
}

// True where the memory of a tensor of the CPU holds its elements, one after the other: no view that conjugates or negates.
inline bool is_plain(const Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// Where an operation reads what `tensor` holds; of a device's once what was queued before is done.
inline Tensor readable(const Tensor& tensor) {
  check_dense(tensor);
  if (tensor.device().is_cpu()) return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  return pinned_like(tensor).copy_(tensor.variable_data(), /*non_blocking=*/true);
}

inline Tensors readable(const Tensors& tensors) {
  Tensors found;
  for (const Tensor& tensor : tensors) found.push_back(readable(tensor));
  return found;
}

// Where an operation writes all of `tensor`; what that holds before is not looked at.
inline Tensor writable(const Tensor& tensor) {
  check_dense(tensor);
  if (!tensor.device().is_cpu()) return pinned_like(tensor);
  return is_plain(tensor) ? tensor : at::empty_like(tensor, tensor.options().requires_grad(false), at::MemoryFormat::Contiguous);
}

// Whether writing to one may change the other.
inline bool share_memory(const Tensor& a, const Tensor& b) {
  if (!a.is_alias_of(b)) return false;
  if (!is_plain(a) || !is_plain(b)) return true;
  const char* const first = static_cast<const char*>(a.const_data_ptr());
  const char* const second = static_cast<const char*>(b.const_data_ptr());
  return first < second + b.nbytes() && second < first + a.nbytes();
}

// What an operation writes to; `put_back` brings the copies home. `read` where it looks at what is there before.
struct Outputs {
  Tensors asked, written;

  explicit Outputs(const Tensors& tensors, bool read = false) : asked(tensors) {
    for (const Tensor& tensor : tensors) written.push_back(read ? readable(tensor) : writable(tensor));
  }

  // A single tensor of a call of several, which is read as it is now although one of those `before` it is its memory too.
  Outputs(const Tensor& tensor, const Tensors& all, size_t before) : Outputs({tensor}, true) {
    const auto shares = [&](const Tensor& other) { return share_memory(tensor, other); };
    const bool shared = std::any_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(before), shares);
    if (shared && written[0].is_same(tensor)) written[0] = tensor.clone();
  }

  // As the operation's own doing, of which autograd hears nothing, like that of one without copies.
  void put_back() const {
    std::optional<c10::StreamGuard> own;
    for (size_t i = 0; i < asked.size(); ++i) {
      if (written[i].is_same(asked[i])) continue;
      const c10::Device device = asked[i].device();
      if (!device.is_cpu() && (!own || own->current_device() != device)) {
        arrived(own);
        own.reset();
        own.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*high priority*/ true));
      }
      asked[i].variable_data().copy_(written[i], /*non_blocking=*/true);
    }
    arrived(own);
  }

 private:
  static void arrived(const std::optional<c10::StreamGuard>& stream) {
    if (stream) stream->current_stream().synchronize();
  }
};

}  // namespace shardwise
