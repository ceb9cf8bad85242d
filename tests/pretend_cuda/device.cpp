// What torch's C++ core asks of a CUDA build, answered without CUDA: one device with one stream on which everything is
// already done, and page-locked host memory that is ordinary memory whose addresses are known. Tensors and operations
// are in device.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <map>
#include <mutex>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Autograd asks for it: it has a thread for each device and orders the streams of forward and backward pass.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Page-locked blocks that are alive, by their first address. Never destroyed: blocks may outlive static objects.
struct PinnedBlocks {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
};
PinnedBlocks& pinned() {
  static auto* blocks = new PinnedBlocks;
  return *blocks;
}

void release(void* data) {
  {
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().sizes.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    void* data = c10::alloc_cpu(size);
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().sizes[static_cast<const char*>(data)] = size;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

}  // namespace

namespace at {

// Asked by pin_memory, is_pinned, torch.Generator, torch.accelerator, and by checks whether CUDA exists.
struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  // Kernels run on the CPU, so its generators are what they need.
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    auto block = pinned().sizes.upper_bound(static_cast<const char*>(data));
    if (block == pinned().sizes.begin()) return false;
    --block;
    return static_cast<const char*>(data) < block->first + block->second;
  }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
