// A device for tests whose streams do nothing until somebody waits for them.
//
// torch's place for devices from outside (PrivateUse1), or with AS_CUDA that of CUDA in a build of torch without CUDA.
// Its memory is malloc's and its kernels are the CPU's. What is real is the order: a copy between pinned memory and the
// device that does not block is put into the queue of the current stream, and carried out when that stream, or an event
// behind it, is waited for, or when the stream computes. Fresh pinned memory is full of 0xCD. So whoever forgets to wait,
// or waits for another stream, finds wrong numbers, every time.
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#ifdef AS_CUDA
#include <ATen/detail/CUDAHooksInterface.h>
#define KEY CUDA
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#define KEY PrivateUse1
#endif

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kind = c10::DeviceType::KEY;

// --- streams

struct Queue {
  std::deque<std::function<void()>> waiting;
  uint64_t done = 0;
  uint64_t end() const { return done + waiting.size(); }
};

std::recursive_mutex mutex;
std::map<StreamId, Queue> queues;
std::vector<std::function<void()>> carried_out;  // let go of without the lock: what they hold may be Python's
int depth = 0;
StreamId last_stream = 0;
thread_local StreamId current = 0;

struct Locked {
  std::unique_lock<std::recursive_mutex> lock{mutex};
  Locked() { ++depth; }
  ~Locked() {
    std::vector<std::function<void()>> over;
    if (--depth == 0) over.swap(carried_out);
    lock.unlock();
  }
};

void carry_out(StreamId stream, uint64_t up_to) {
  const Locked locked;
  Queue& queue = queues[stream];
  while (queue.done < up_to && !queue.waiting.empty()) {
    auto task = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.done;
    task();
    carried_out.push_back(std::move(task));
  }
}

void carry_out(StreamId stream) { carry_out(stream, UINT64_MAX); }

void carry_out_all() {
  const Locked locked;
  for (StreamId stream = 0; stream <= last_stream; ++stream) carry_out(stream);
}

void put(StreamId stream, std::function<void()> task) {
  const Locked locked;
  queues[stream].waiting.push_back(std::move(task));
}

struct Mark {
  StreamId stream;
  uint64_t up_to;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device) const override { return Device(kind, 0); }
  Device getDevice() const override { return Device(kind, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static Stream stream(StreamId id) { return Stream(Stream::UNSAFE, Device(kind, 0), id); }
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override {
    const Locked locked;
    return stream(++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream to) const override {
    const StreamId before = current;
    current = to.id();
    return stream(before);
  }
  bool queryStream(const Stream& stream) const override { return synchronizeStream(stream), true; }
  void synchronizeStream(const Stream& stream) const override { carry_out(stream.id()); }
  void synchronizeDevice(const DeviceIndex) const override { carry_out_all(); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    const Locked locked;
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = {stream.id(), queues[stream.id()].end()};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    put(stream.id(), [mark = *static_cast<Mark*>(event)] { carry_out(mark.stream, mark.up_to); });
  }
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void synchronizeEvent(void* event) const override {
    if (event) carry_out(static_cast<Mark*>(event)->stream, static_cast<Mark*>(event)->up_to);
  }
};

C10_REGISTER_GUARD_IMPL(KEY, Guard);

// --- memory

std::set<const void*> pinned;

void give_back(void* memory) {
  {
    const Locked locked;
    pinned.erase(memory);
  }
  std::free(memory);
}

void* take(size_t bytes) { return std::memset(std::malloc(bytes + 64), 0xCD, bytes + 64); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = take(bytes);
    return {memory, memory, &std::free, Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Locked locked;
    void* memory = take(bytes);
    pinned.insert(memory);
    return {memory, memory, &give_back, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kind, &device_memory);

void resize_storage(const c10::Storage& storage, size_t bytes) {
  carry_out_all();
  auto memory = device_memory.allocate(bytes);
  std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

#ifdef AS_CUDA
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override { carry_out_all(); }
#else
struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& of, size_t bytes) const override { resize_storage(of, bytes); }
#endif
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return Device(kind, 0); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* memory) const override {
    const Locked locked;
    return pinned.count(memory) > 0;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// --- kernels

Tensor seen_by_cpu(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

bool is_pinned(const Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_pinned(); }

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto copy = [from = from.variable_data(), to = to.variable_data()] {
    at::NoGradGuard no_grad;
    seen_by_cpu(to).copy_(seen_by_cpu(from));
  };
  if (non_blocking && (is_pinned(from) || is_pinned(to))) {
    put(current, copy);
  } else {
    carry_out(current);
    copy();
  }
  return to;
}

#ifdef AS_CUDA
// What torch leads to kernels of CUDA without asking the dispatcher for them.
Tensor& copy_into(Tensor& self, const Tensor& from, bool non_blocking) {
  copy_from(from.expand_as(self), self, non_blocking);
  return self;
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return 0;  // the products one by one, at::SDPBackend::math
}
#endif

void record_stream(Tensor&, Stream) {}  // memory is given back when nobody holds it, in whatever stream

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  carry_out(current);
  return seen_by_cpu(tensor).item();
}

constexpr c10::DispatchKeySet keys(c10::DispatchKey::KEY);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) { at::native::cpu_fallback(operation, stack); }

TORCH_LIBRARY_IMPL(aten, KEY, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
#ifdef AS_CUDA
  m.impl("copy_", &copy_into);
#endif
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

const int registered = [] {
#ifdef AS_CUDA
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
#else
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
#endif
  return 0;
}();

}  // namespace

#ifdef AS_CUDA
TORCH_LIBRARY(lazy_device, m) {
  m.def("resize_storage", [](const Tensor& of, int64_t bytes) { resize_storage(of.storage(), bytes); });
}

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
#endif
