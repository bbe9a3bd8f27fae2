// The fields of a problem, of a configuration or of a choice, each named once, for the registry.
// Host C++ only.
#pragma once

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

// Defines visit_fields(Struct&, visit), which calls visit("name", value) for each of the fields, in
// the order in which they are declared: TK_FIELDS(Problem, m, n, k). Up to 100 of them.
#define TK_FIELDS(Struct, ...)                                    \
    template <typename Visitor>                                   \
    void visit_fields(Struct& fields, Visitor&& visit) {          \
        TK_FIELDS_X4(TK_FIELDS_VISIT(fields, visit, __VA_ARGS__)) \
    }

// The same of a choice: its kernel as "strategy", then the fields of its config and its schedule.
#define TK_CHOICE_FIELDS(Choice)                         \
    template <typename Visitor>                          \
    void visit_fields(Choice& choice, Visitor&& visit) { \
        visit("strategy", choice.kernel);                \
        visit_fields(choice.config, visit);              \
        visit_fields(choice.schedule, visit);            \
    }

// One field; the rest follows when the preprocessor scans what this has become again.
#define TK_FIELDS_VISIT(fields, visit, name, ...) \
    visit(#name, (fields).name);                  \
    __VA_OPT__(TK_FIELDS_AGAIN TK_FIELDS_OPEN(fields, visit, __VA_ARGS__))
#define TK_FIELDS_AGAIN() TK_FIELDS_VISIT
#define TK_FIELDS_OPEN ()
#define TK_FIELDS_X4(...) TK_FIELDS_X3(TK_FIELDS_X3(TK_FIELDS_X3(TK_FIELDS_X3(__VA_ARGS__))))
#define TK_FIELDS_X3(...) TK_FIELDS_X2(TK_FIELDS_X2(TK_FIELDS_X2(TK_FIELDS_X2(__VA_ARGS__))))
#define TK_FIELDS_X2(...) TK_FIELDS_X1(TK_FIELDS_X1(TK_FIELDS_X1(TK_FIELDS_X1(__VA_ARGS__))))
#define TK_FIELDS_X1(...) __VA_ARGS__
