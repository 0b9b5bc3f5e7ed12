// A device of PyTorch's key PrivateUse1 whose memory is the host's, for tests: PyTorch takes it for another device than
// the CPU. Kernels are the CPU's, on copies or on the same memory.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* memory = std::malloc(nbytes ? nbytes : 1);
        return {memory, memory, &std::free, c10::Device(TYPE, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
} memory;
REGISTER_ALLOCATOR(TYPE, &memory)

struct Guard final : c10::impl::NoOpDeviceGuardImpl<TYPE> {
    c10::Device getDevice() const override { return {TYPE, 0}; }
    c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
} hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
    return tensor.is_cpu() ? tensor
                           : at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                           tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    on_host(to).copy_(on_host(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    TORCH_CHECK(from.sizes() == to.sizes(), "this device's tensors keep their size");
    return copy_from(from, to, false);
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    at::native::cpu_fallback(operation, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("view", &at::native::view);
    library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
