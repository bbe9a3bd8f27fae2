// Vectors between global memory, shared memory and registers, TMA included.
#include "memory_global.cuh"

namespace unit {
namespace {

template <int WARPS, class RV, class SV>
__global__ void shared_register_kernel(const __grid_constant__ global<typename RV::T> r_data,
                                       const __grid_constant__ global<typename SV::T> s_data,
                                       const bool loads) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    SV& shared = al.allocate<SV>();
    RV registers;
    if (loads) {
        read(shared, s_data);
        arch::sync_block();
        G::load(registers, shared);
        write_band(r_data, registers);
    } else {
        read_band(registers, r_data);
        G::store(shared, registers);
        arch::sync_block();
        write(s_data, shared);
    }
}
template <int WARPS, int length, class L, class R, class S>
void shared_register_cases() {
    using RV = rv<R, length, L>;
    using SV = sv<S, length * WARPS>;
    for (const bool loads : {true, false}) {
        run(text("%s shared %s %s, %s", loads ? "load" : "store", scope_name(WARPS).c_str(),
                 object_name<RV>().c_str(), object_name<SV>().c_str()),
            [&](Case& c) {
                const Type from = loads ? type_of<S> : type_of<R>,
                           to = loads ? type_of<R> : type_of<S>;
                const Values values = c.uniform(from, SV::length, -8, 8);
                void* source = c.input("source", from, values);
                void* destination = c.output("destination", to, values.size());
                c.expect(rounded(to, values));
                c.launch([&] {
                    kittens::launch(
                        shared_register_kernel<WARPS, RV, SV>, 1, 32 * WARPS, 1,
                        shared_bytes_of<SV>(), nullptr,
                        matrix(static_cast<R*>(loads ? destination : source), 1, SV::length),
                        matrix(static_cast<S*>(loads ? source : destination), 1, SV::length),
                        loads);
                });
            });
    }
}

enum class Bulk { load, prefetch_load, store, add, min, max };

template <class SV>
using vector_global = global<typename SV::T, SV>;

template <class SV>
__global__ void tma_vector_kernel(const __grid_constant__ vector_global<SV> layout,
                                  const __grid_constant__ global<typename SV::T> plain,
                                  const coord<SV> at, const Bulk how) {
    using T = typename SV::T;
    shared_allocator<> al(shared_memory());
    SV& vec = al.allocate<SV>();
    semaphore& arrived = al.allocate<semaphore>();
    if (how == Bulk::load || how == Bulk::prefetch_load) {
        poison_shared(vec);
        if (threadIdx.x == 0) {
            init_semaphore(arrived, 0, 1);
            arch::mbarrier_init_fence();
            if (how == Bulk::prefetch_load) tma::prefetch<SV>(layout, at);
            tma::expect(arrived, vec);
            tma::load_async(vec, layout, at, arrived);
        }
        arch::sync_block();
        wait(arrived, 0);
        write(plain, vec);
        return;
    }
    read(vec, plain);
    arch::sync_block();
    if (threadIdx.x != 0) return;
    if (how == Bulk::store) tma::store_async(layout, vec, at);
    if constexpr (!float_8bit<T>) {
        if (how == Bulk::add) tma::store_add_async(layout, vec, at);
    }
    if constexpr (float_16bit<T>) {
        if (how == Bulk::min) tma::store_min_async(layout, vec, at);
        if (how == Bulk::max) tma::store_max_async(layout, vec, at);
    }
    tma::store_async_wait();
}
template <class SV>
void tma_vector_cases() {
    using T = typename SV::T;
    constexpr int chunk = 16 / int(sizeof(T));
    constexpr Type type = type_of<T>;
    const int across = SV::length + (SV::length / chunk + 1) / 2 * chunk;
    const View view = View::padded(2, 2, 3, across, chunk, 1);
    const std::pair<const char*, coord<SV>> places[] = {{"first", coord<SV>(1, 0, 2, 0)},
                                                        {"ragged", coord<SV>(1, 1, 2, 1)},
                                                        {"shifted", elements(0, 1, 1, chunk)},
                                                        {"outside", elements(0, 1, 3, 0)}};
    const char* names[] = {"load",      "prefetch and load", "store",
                           "store_add", "store_min",         "store_max"};
    for (const auto& [place, at] : places) {
        for (int op = 0; op < 6; ++op) {
            const auto how = static_cast<Bulk>(op);
            if (how == Bulk::add && float_8bit<T>) continue;
            if (how > Bulk::add && !float_16bit<T>) continue;
            run(text("tma %s %s %s", names[op], object_name<SV>().c_str(), place), [&](Case& c) {
                const bool loads = op < 2;
                const Values plain = c.uniform(type, SV::length, -8, 8);
                const Values layout = how == Bulk::store ? Values(view.extent(), poison)
                                                         : c.uniform(type, view, -8, 8);
                T* plain_data =
                    loads ? c.output<T>("vector", plain.size()) : c.input<T>("vector", plain);
                T* layout_data =
                    loads ? c.input<T>("layout", layout) : c.output<T>("layout", layout);
                Values expected = loads ? Values(plain.size(), 0.0) : layout;
                const element_coord e = at.position();
                for (int i = 0; i < SV::length; ++i) {
                    if (!view.contains(e.b, e.d, e.r, e.c + i)) continue;
                    const size_t k = view.index(e.b, e.d, e.r, e.c + i);
                    const double x = plain[i], old = layout[k];
                    if (loads)
                        expected[i] = old;
                    else
                        expected[k] = how == Bulk::add   ? rounded(type, old + x)
                                      : how == Bulk::min ? std::min(old, x)
                                      : how == Bulk::max ? std::max(old, x)
                                                         : x;
                }
                c.expect(expected);
                c.launch([&] {
                    kittens::launch(tma_vector_kernel<SV>, 1, 64, 1, shared_bytes_of<SV>() + 1024,
                                    nullptr, make_global<vector_global<SV>>(layout_data, view),
                                    matrix(plain_data, 1, SV::length), at, how);
                });
            });
        }
    }
}

void transfers() {
    for_types<align_l, ortho_l, naive_l>([]<class L>(std::type_identity<L>) {
        transfer_cases<1, 2, rv_fl<32, L>>();
        shared_register_cases<1, 64, L, float, float>();
        shared_register_cases<4, 16, L, bf16, bf16>();
        shared_register_cases<1, 80, L, float, bf16>();
        if constexpr (intensity >= 2) {
            transfer_cases<2, 2, rv_bf<48, L>, float>();
            shared_register_cases<8, 16, L, half, float>();
            shared_register_cases<2, 144, L, bf16, half>();
        }
    });
    transfer_cases<1, 2, sv_bf<64>>();
    transfer_cases<4, 2, sv_fl<80>>();
    if constexpr (intensity >= 2) transfer_cases<2, 2, sv<fp8e4m3, 48>>();
    tma_vector_cases<sv_bf<64>>();
    tma_vector_cases<sv_fl<16>>();
    tma_vector_cases<sv_hf<512>>();
    tma_vector_cases<sv<fp8e4m3, 256>>();
}
const Section section("memory/vec", transfers);

}  // namespace
}  // namespace unit
