// What a module exports for each kernel: how to launch it, and its parameters for Python to check.
#pragma once

namespace emulation {

// One letter for the kind and the size in bytes; `*` before it for a pointer, `const *` for one to constant data.
template <class T>
void describe(char*& text) {
    using Plain = std::remove_cv_t<T>;
    if constexpr (std::is_pointer_v<Plain>) {
        using Pointee = std::remove_pointer_t<Plain>;
        text += sprintf(text, std::is_const_v<Pointee> ? "const *" : "*");
        describe<Pointee>(text);
    } else {
        char kind = 'V';  // void, or a struct: any array will do
        if constexpr (std::is_same_v<Plain, __nv_bfloat16>) kind = 'b';
        else if constexpr (std::is_same_v<Plain, __half> || std::is_floating_point_v<Plain>) kind = 'f';
        else if constexpr (std::is_integral_v<Plain>) kind = std::is_signed_v<Plain> ? 'i' : 'u';
        if constexpr (std::is_void_v<Plain>) text += sprintf(text, "V1");
        else text += sprintf(text, "%c%d", kind, int(sizeof(Plain)));
    }
}

template <class... Parameters>
const char* signature(void (*)(Parameters...)) {
    static char text[16 * (sizeof...(Parameters) + 1)];
    char* end = text;
    ((describe<Parameters>(end), *end++ = ','), ...);
    *end = 0;
    return text;
}

template <class... Parameters>
struct Call {
    void (*kernel)(Parameters...);
    void** arguments;

    template <size_t... I>
    void apply(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
    }
    static void once(void* call) { static_cast<Call*>(call)->apply(std::index_sequence_for<Parameters...>()); }
};

inline thread_local char shared_memory_anchor;

template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const Launch* launch, void** arguments) {
    Call<Parameters...> call{kernel, arguments};
    *(volatile char*)&shared_memory_anchor = 0;  // the first touch makes the module's TLS segment
    return run(launch, Call<Parameters...>::once, &call, &shared_memory_anchor);
}

}  // namespace emulation

#define EMULATED_EXPORT(kernel)                                                                                       \
    extern "C" EMULATED_API const char* emulated_launch_##kernel(const emulation::Launch* how, void** arguments) {    \
        return emulation::launch(kernel, how, arguments);                                                             \
    }                                                                                                                 \
    extern "C" EMULATED_API const char* emulated_signature_##kernel() { return emulation::signature(kernel); }
#define EMULATED_KERNELS(names) \
    extern "C" EMULATED_API const char* emulated_kernels() { return names; }
