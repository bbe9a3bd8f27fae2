// What the ops of both directions take on the emulator, beside q, k and v.
#pragma once

#include "csrc/attention/common/operands.h"
#include "csrc/common/emulated.h"

namespace thunderkittens::attention {

struct EmulatedArguments {
    std::optional<Packing<emulated::Array>> packing;
    Options<emulated::Array> options;

    explicit EmulatedArguments(const emulated::Call& call)
        : options{.causal = call.scalar<int64_t>("causal", 0),
                  .window_left = call.scalar<int64_t>("window_left", -1),
                  .window_right = call.scalar<int64_t>("window_right", -1),
                  .softcap = call.scalar("softcap", 0.0),
                  .alibi_slopes = call.if_given("alibi_slopes"),
                  .sink = call.if_given("sink"),
                  .deterministic = call.scalar("deterministic", false)} {
        if (call.scalars.contains("scale")) options.scale = call.scalar("scale", 1.0);
        if (call.optional("cu_seqlens_q")) {
            packing = {call.array("cu_seqlens_q"), call.array("cu_seqlens_k"),
                       call.scalar<int64_t>("max_seqlen_q", 0),
                       call.scalar<int64_t>("max_seqlen_k", 0)};
        }
    }
    const Packing<emulated::Array>* packed() const { return packing ? &*packing : nullptr; }
};

}  // namespace thunderkittens::attention
