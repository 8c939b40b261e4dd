// A device of another package: its memory is the host's, its operators are those of the CPU, its streams have always
// finished. torch knows it by the name "hosted".

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace hosted {

c10::DeviceIndex devices() {
  const char* told = std::getenv("HOSTED_DEVICES");
  return static_cast<c10::DeviceIndex>(told ? std::atoi(told) : 4);
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr size_t ALIGNED = 64;

thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int64_t> used{0}, peak{0};

struct Block {
  void* place;
  int64_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  used -= block->size;
  std::free(block->place);
  delete block;
}

// Counts bytes, as torch.accelerator.memory_stats tells them: of all devices of the process, which uses one.
struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(c10::DeviceType::PrivateUse1, current);
    if (!size) return {nullptr, nullptr, &release, device};
    void* place = nullptr;
    TORCH_CHECK(!posix_memalign(&place, ALIGNED, size), "hosted: no memory for ", size, " bytes");
    const auto now = used += static_cast<int64_t>(size);
    for (auto most = peak.load(); most < now && !peak.compare_exchange_weak(most, now);) {}
    return {place, new Block{place, static_cast<int64_t>(size)}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = used;
      (*bytes)[0].peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak = used.load(); }
};

Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// An event is the moment at which it was recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    current = device.index();
    return before;
  }
  Device getDevice() const override { return {type(), current}; }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, current_stream); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, device, ++last_stream); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices(); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t;
    *static_cast<int64_t*>(*event) = now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return static_cast<double>(*static_cast<int64_t*>(to) - *static_cast<int64_t*>(from)) / 1e6;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices(); }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  // The operators are the CPU's, so their random numbers come from its generators.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr fresh = memory.allocate(size);
    std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(c10::DeviceType::PrivateUse1, current)));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(c10::DeviceType::PrivateUse1, current)));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar value(const at::Tensor& self) {
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto need = c10::multiply_integers(size) * self.element_size() + self.storage_offset() * self.element_size();
  if (static_cast<size_t>(need) > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(at::Tensor&, Stream) {}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &value);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  at::Tensor plain = tensor.detach();
  return at::from_blob(
      plain.data_ptr(), plain.sizes(), plain.strides(), [plain](void*) {}, plain.options().device(at::kCPU));
}

void begin() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace hosted
