// The names of the verbs that come in families. One list, expanded where the verbs are defined (for
// every group) and where they become free functions (for a warp).
#pragma once

// clang-format off
// (d)
#define KITTENS_CONSTANT_VERBS(X) X(zero) X(one) X(pos_infty) X(neg_infty)
// (d, s)
#define KITTENS_UNARY_VERBS(X)                                                              \
    X(exp) X(exp2) X(log) X(log2) X(sqrt) X(rsqrt) X(rcp) X(tanh) X(tanh_approx) X(sigmoid) \
    X(abs) X(relu) X(neg)
// (d, a, b), and with _row and _col (d, a, vector)
#define KITTENS_BINARY_VERBS(X) X(add) X(sub) X(mul) X(div) X(max) X(min)
// (name, functor) of (scalar, vector), and with row_ and col_ (vector, tile)
#define KITTENS_REDUCTIONS(X) X(max, max) X(min, min) X(sum, add) X(prod, mul)
// (d, s, ...)
#define KITTENS_MASK_VERBS(X)                                                                \
    X(make_causal) X(make_causal_t) X(tril) X(triu)                                          \
    X(left_fill) X(right_fill) X(upper_fill) X(lower_fill) X(upper_right_fill)
// clang-format on
