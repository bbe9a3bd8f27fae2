// Operands of LoLCATS on the emulator: arrays in CPU memory.
#pragma once

#include "csrc/linear_attention/based/emulated_operands.h"
#include "csrc/linear_attention/lolcats/lolcats.h"

namespace thunderkittens::linear_attention {

inline LolcatsProblem checked_lolcats_problem(const emulated::Call& call) {
    const Array &q = call.array("q"), &k = call.array("k"), &v = call.array("v");
    const Array &q_map = call.array("q_map"), &k_map = call.array("k_map");
    TK_CHECK(q.dims() == 4 && k.dims() == 4 && v.size == k.size && q_map.dims() == 3 &&
                 k_map.size == q_map.size && q_map.size[0] == q.size[1] &&
                 q_map.size[1] == q.size[3] && k.size[0] == q.size[0] && k.size[2] == q.size[2] &&
                 k.size[3] == q.size[3],
             "tk.lolcats: q ", tuple_text(q.size), ", k ", tuple_text(k.size), ", v ",
             tuple_text(v.size), " and the maps do not match");
    LolcatsProblem p;
    p.dtype = q.dtype;
    p.batch = q.size[0];
    p.heads = q.size[1];
    p.kv_heads = k.size[1];
    p.length = q.size[2];
    p.head_dim = q.size[3];
    p.features = q_map.size[2];
    p.continued = call.optional("lengths") != nullptr;
    return p;
}

// A state among the call's arrays, packed, or a new one; empty where there is none.
struct LolcatsState {
    Array numerator, denominator, keys, values, lengths;

    LolcatsState() = default;
    explicit LolcatsState(const emulated::Call& call) {
        for_each([&](const char* name, Array& part) {
            if (const Array* x = call.optional(name)) part = packed(*x);
        });
    }
    explicit LolcatsState(const LolcatsProblem& p) {
        numerator = emulated::allocate({p.batch, p.heads, 2 * p.features, p.head_dim}, DType::fp32);
        denominator = emulated::allocate({p.batch, p.heads, 2 * p.features}, DType::fp32);
        keys = emulated::allocate({p.batch, p.kv_heads, CACHE, p.head_dim}, p.dtype);
        values = emulated::allocate({p.batch, p.kv_heads, CACHE, p.head_dim}, p.dtype);
        lengths = emulated::allocate({p.batch}, DType::int32);
    }
    template <typename F>
    void for_each(F f) {
        f("numerator", numerator);
        f("denominator", denominator);
        f("keys", keys);
        f("values", values);
        f("lengths", lengths);
    }
    template <typename F>
    void for_each(F f) const {
        const_cast<LolcatsState*>(this)->for_each([&](const char* name, const Array& part) {
            if (part.data) f(name, part);
        });
    }
    LolcatsStatePointers pointers() const {
        if (!lengths.data) return {};
        return {floats(numerator), floats(denominator), keys.data, values.data,
                reinterpret_cast<int*>(lengths.data)};
    }
    void enter(emulated::Result& result) const {
        for_each([&](const char* name, const Array& part) { result.arrays[name] = part; });
    }
    void may_read(emulated::Launch& scope) const {
        for_each([&](const char* name, const Array& part) { scope.may_read(name, part); });
    }
    void may_write(emulated::Launch& scope) const {
        for_each([&](const char* name, const Array& part) { scope.may_write(name, part); });
    }
};

}  // namespace thunderkittens::linear_attention
