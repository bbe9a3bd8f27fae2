// rotary on the emulator. In place, x is changed.
#include "csrc/common/emulated.h"
#include "csrc/rotary/rotary_body.h"

namespace thunderkittens::rotary {
namespace {

using emulated::Array;

emulated::Result run(const emulated::Call& call) {
    const Backend<Array> on(call);
    const bool in_place = call.scalar("in_place", false);
    Array out;
    rotary_body<Array>(
        on, call.array("x"), in_place ? nullptr : &out,
        {call.array("cos"), call.array("sin"), call.if_given("positions"), call.if_given("offsets"),
         call.if_given("cu_seqlens"), call.scalar("interleaved", false),
         call.scalar("inverse", false), call.scalar("heads", int64_t{-1})});
    return on.result(in_place ? std::map<std::string, Array>{}
                              : std::map<std::string, Array>{{"out", out}});
}

const bool registered = emulated::register_run("rotary", &run);

}  // namespace
}  // namespace thunderkittens::rotary
