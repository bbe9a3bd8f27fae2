// Fibers: a stack of its own for every emulated thread, and a switch between them in a few
// nanoseconds. The x86-64 switch saves what the calling convention says a callee preserves; other
// processors use ucontext.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if !defined(__x86_64__) || defined(KITTENS_PORTABLE_FIBERS)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#define KITTENS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KITTENS_ASAN 1
#endif
#endif
#if defined(KITTENS_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kittens::inline on_cpu {
namespace emulated {

#if defined(KITTENS_ASAN)
constexpr size_t STACK_BYTES = size_t(1) << 20;
#else
constexpr size_t STACK_BYTES = size_t(256) << 10;
#endif

struct Stack {
    char* memory = nullptr;   // its lowest page is a guard
    char* reached = nullptr;  // how far down threads were that have run on it; null: all is zero
};

// Memory for stacks, kept by each host thread for its next launch.
class StackPool {
  public:
    ~StackPool() {
        for (const Stack& stack : free_) munmap(stack.memory, STACK_BYTES);
    }
    Stack take() {
        if (!free_.empty()) {
            const Stack stack = free_.back();
            free_.pop_back();
            return stack;
        }
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) throw std::bad_alloc();
        mprotect(stack, 4096, PROT_NONE);
        return {.memory = static_cast<char*>(stack)};
    }
    void give_back(const Stack& stack) { free_.push_back(stack); }

  private:
    std::vector<Stack> free_;
};
inline thread_local StackPool stack_pool;

#if defined(__x86_64__) && !defined(KITTENS_PORTABLE_FIBERS)
__attribute__((naked, noinline)) inline void switch_stack(void**, void*) {
    asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
#endif

// A flow of control. One without a stack stands for the host thread itself.
class Fiber {
  public:
    using Entry = void (*)();

    void start(const Stack& of, Entry entry) {
        stack_ = of;
        char* const stack = of.memory;
#if defined(KITTENS_ASAN)
        __asan_unpoison_memory_region(stack + 4096, STACK_BYTES - 4096);
#endif
        // Registers that a thread has not written hold NaN.
        poison(stack_);
#if defined(__x86_64__) && !defined(KITTENS_PORTABLE_FIBERS)
        // As a call would leave it: aligned to 16 bytes before the return address is pushed.
        auto* top = reinterpret_cast<void**>(stack + STACK_BYTES - 64);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        pointer_ = top;
#else
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack + 4096;
        context_.uc_stack.ss_size = STACK_BYTES - 4096;
        context_.uc_link = nullptr;
        makecontext(&context_, entry, 0);
#endif
    }
    const Stack& stack() const { return stack_; }
    // The upper 16 KiB, or of these what threads have reached since. How far down they were is seen
    // where they switch; in between a thread may go 4 KiB further.
    static void poison(Stack& stack) {
        constexpr size_t POISONED = size_t(16) << 10, FURTHER = size_t(4) << 10;
        char* const top = stack.memory + STACK_BYTES;
        char* const last = top - POISONED;
        char* const from = stack.reached ? std::max(stack.reached - FURTHER, last) : last;
        std::memset(from, 0xff, static_cast<size_t>(top - from));
        stack.reached = top;
    }

    // Leaves `from`, whose state is kept unless it is over, and continues `to`.
    static void change(Fiber& from, Fiber& to, bool from_is_over = false) {
#if defined(KITTENS_ASAN)
        const void* bottom = to.stack_.memory ? to.stack_.memory + 4096 : to.host_bottom_;
        const size_t size = to.stack_.memory ? STACK_BYTES - 4096 : to.host_size_;
        __sanitizer_start_switch_fiber(from_is_over ? nullptr : &from.fake_, bottom, size);
#else
        (void)from_is_over;
#endif
        auto* const here = static_cast<char*>(__builtin_frame_address(0));
        from.stack_.reached = std::min(from.stack_.reached, here);
#if defined(__x86_64__) && !defined(KITTENS_PORTABLE_FIBERS)
        switch_stack(&from.pointer_, to.pointer_);
#else
        swapcontext(&from.context_, &to.context_);
#endif
#if defined(KITTENS_ASAN)
        __sanitizer_finish_switch_fiber(from.fake_, nullptr, nullptr);
#endif
    }
    // First thing that a new fiber does; `host` is where it came from.
    static void entered(Fiber& host) {
#if defined(KITTENS_ASAN)
        __sanitizer_finish_switch_fiber(nullptr, &host.host_bottom_, &host.host_size_);
#else
        (void)host;
#endif
    }

  private:
    Stack stack_;
#if defined(__x86_64__) && !defined(KITTENS_PORTABLE_FIBERS)
    void* pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
#if defined(KITTENS_ASAN)
    void* fake_ = nullptr;
    const void* host_bottom_ = nullptr;
    size_t host_size_ = 0;
#endif
};

}  // namespace emulated
}  // namespace kittens::inline on_cpu
