// Fields of an op's choice that are forced, for measurements of the choice (`bench OP --regret`):
// set by the exported function thunderkittens_force of _cuda.so, for the whole process, and read by
// the op behind choose(). A call that is not measured pays one relaxed load.
#pragma once

#include <atomic>
#include <string>

#include "csrc/common/registry.h"

namespace thunderkittens {

struct Forced {
    std::string op;
    Fields fields;
};
extern std::atomic<const Forced*> forced_choice;  // null: nothing is forced

// Overwrites the fields that are forced of this op. They have to be some of candidates(), for no
// launch checks what choose() never asks for.
template <class Choice>
void force(const char* op, Choice& choice) {
    if (forced_choice.load(std::memory_order_relaxed) == nullptr) [[likely]]
        return;
    const Forced* forced = forced_choice.load(std::memory_order_acquire);
    if (forced == nullptr || forced->op != op) return;
    TK_CHECK(detail::force_fields(choice, forced->fields), op,
             ": a forced field is none of the choice's");
}

}  // namespace thunderkittens
