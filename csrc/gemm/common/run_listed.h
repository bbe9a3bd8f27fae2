// From a choice of native and portable kernels to the launch of one that is compiled. Host C++
// only.
#pragma once

#include "csrc/common/check.h"
#include "csrc/common/device.h"
#include "csrc/gemm/common/listed.h"

namespace thunderkittens::gemm {

// As launch_listed() of values of which some are portable; those may not be built. An error that
// begins with `op` where there is none.
template <auto at, std::size_t count, typename Value, typename Launch>
void run_listed(const char* op, const Value& wanted, Launch launch) {
    const bool found = launch_listed<at, count>(wanted, [&]<Value value>() {
        if constexpr (!value.portable || BUILDS_PORTABLE) launch.template operator()<value>();
        return true;
    });
    TK_CHECK(found, op, ": no kernel ", kernel_name(wanted));
}

}  // namespace thunderkittens::gemm
