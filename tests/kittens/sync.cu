// Synchronisation: semaphores and their phases, rings, named barriers, clusters, one elected
// thread, the group's forms of one-thread operations, register reallocation, programmatic dependent
// launch. A kernel writes what it saw; the cases state it.
#include "device.cuh"

namespace unit {
namespace {

using Output = global<float>;

template <class... Arguments>
void sync_case(const std::string& name, int blocks, int cluster, int threads,
               const Values& expected, void (*kernel)(Output, Arguments...),
               Arguments... arguments) {
    run(name, [&](Case& c) {
        float* seen = c.output<float>("seen", expected.size());
        c.expect(expected);
        c.launch([&] {
            kittens::launch(kernel, blocks, threads, cluster, 32 * 1024, nullptr,
                            matrix(seen, 1, int(expected.size())), arguments...);
        });
    });
}
__device__ void report(const Output& seen, int i, float value) {
    arch::store_global(seen.at(elements(0, i)), value);
}

// A phase completes with the last arrival, not before.
__global__ void phases(const __grid_constant__ Output seen, const int arrivals,
                       const int transactions, const int rounds) {
    shared_allocator<> al(shared_memory());
    semaphore& s = al.allocate<semaphore>();
    if (threadIdx.x != 0) return;
    init_semaphore(s, arrivals, transactions);
    int i = 0;
    for (int round = 0; round < rounds; ++round) {
        const int phase = round % 2;
        // The phase before the first counts as completed.
        report(seen, i++, test_wait(s, phase ^ 1));
        if (arrivals + transactions > 1) {
            arrive(s, static_cast<uint32_t>(arrivals + transactions - 1));
        }
        report(seen, i++, test_wait(s, phase));
        arrive(s);
        wait(s, phase);
        report(seen, i++, test_wait(s, phase));
        report(seen, i++, try_wait(s, phase));
    }
    invalidate_semaphore(s);
}

// Bytes count as well as arrivals: the first block of two sends to the second.
__global__ void transactions(const __grid_constant__ Output seen, const int bytes) {
    shared_allocator<> al(shared_memory());
    semaphore& s = al.allocate<semaphore>();
    sv_fl<1024>& from = al.allocate<sv_fl<1024>>();
    sv_fl<1024>& to = al.allocate<sv_fl<1024>>();
    const bool receives = kittens::cluster::rank() == 1;
    for_each_place<sv_fl<1024>>([&](int i) { from.set(i, float(i)); });
    poison_shared(to);
    if (threadIdx.x == 0 && receives) {
        init_semaphore(s, 1, 1);
        arch::mbarrier_init_fence();
        tma::expect_bytes(s, static_cast<uint32_t>(bytes));
        report(seen, 0, test_wait(s, 0));
        arrive(s);
        report(seen, 1, test_wait(s, 0));
    }
    kittens::cluster::sync();
    if (threadIdx.x == 0 && !receives) {
        arch::bulk_copy_to_cluster(arch::map_shared_rank(to.address(), 1), from.address(),
                                   static_cast<uint32_t>(bytes),
                                   arch::map_shared_rank(s.address(), 1));
    }
    if (receives) {
        wait(s, 0);
        if (threadIdx.x == 0) {
            report(seen, 2, to.get(bytes / 4 - 1));
            report(seen, 3, bytes < 4096 ? float(isnan(to.get(bytes / 4))) : 1.0f);
        }
    }
    kittens::cluster::sync();
}

// One producer warp, one consumer warp, a ring of stages whose parities are bits of one word.
__global__ void ring(const __grid_constant__ Output seen, const int stages, const int rounds) {
    shared_allocator<> al(shared_memory());
    semaphore(&full)[16] = al.allocate<semaphore, 16>();
    semaphore(&empty)[16] = al.allocate<semaphore, 16>();
    sv_fl<32>(&slots)[16] = al.allocate<sv_fl<32>, 16>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            init_semaphore(full[i], 32);
            init_semaphore(empty[i], 32);
        }
    }
    arch::sync_block();
    uint32_t phasebits = 0xFFFF0000;  // half 0 waits for data first, half 1 finds its slots free
    const int lane = laneid();
    if (kittens::warpid() == 0) {
        for (int i = 0; i < rounds; ++i) {
            const int stage = i % stages;
            wait(empty[stage], get_phasebit<1>(phasebits, stage));
            update_phasebit<1>(phasebits, stage);
            slots[stage].set(lane, float(i + lane));
            arrive(full[stage]);
        }
    } else {
        float sum = 0;
        for (int i = 0; i < rounds; ++i) {
            const int stage = i % stages;
            wait(full[stage], get_phasebit<0>(phasebits, stage));
            update_phasebit<0>(phasebits, stage);
            sum += slots[stage].get(31 - lane) * float(i + 1);
            arrive(empty[stage]);
        }
        report(seen, lane, sum);
    }
}

// Groups of a block meet at barriers of their own; warps hand values around within each.
template <int WARPS>
__global__ void group_barriers(const __grid_constant__ Output seen) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    sv_fl<1024>& values = al.allocate<sv_fl<1024>>();
    const int first = G::groupid() * G::GROUP_THREADS, me = G::laneid();
    for (int round = 0; round < 4; ++round) {
        values.set(first + me, float(me * (round + 1)));
        G::sync(1 + G::groupid());
        const float other = values.get(first + (me + WARP_THREADS) % G::GROUP_THREADS);
        G::sync(1 + G::groupid());
        if (round == 3) report(seen, first + me, other);
    }
}
// One group announces, another waits.
__global__ void arrive_then_sync(const __grid_constant__ Output seen) {
    shared_allocator<> al(shared_memory());
    sv_fl<32>& values = al.allocate<sv_fl<32>>();
    if (kittens::warpid() == 0) {
        values.set(laneid(), float(laneid()));
        arch::named_barrier_arrive(3, 64);
    } else {
        arch::named_barrier_sync(3, 64);
        report(seen, laneid(), values.get(31 - laneid()));
    }
}
__global__ void block_barrier(const __grid_constant__ Output seen, const int id) {
    shared_allocator<> al(shared_memory());
    sv_fl<256>& values = al.allocate<sv_fl<256>>();
    values.set(int(threadIdx.x), float(threadIdx.x));
    everyone::sync(id);
    report(seen, int(threadIdx.x), values.get(255 - int(threadIdx.x)));
}

// Exactly one thread of every group is elected, always the same.
template <int WARPS>
__global__ void elected(const __grid_constant__ Output seen) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    sv_fl<1024>& counts = al.allocate<sv_fl<1024>>();
    const int me = int(threadIdx.x);
    const bool first = G::elect_leader(), second = G::elect_leader();
    counts.set(me, float(first) + (first == second ? 0.0f : 100.0f));
    arch::sync_block();
    if (G::laneid() != 0) return;
    float sum = 0;
    for (int i = 0; i < G::GROUP_THREADS; ++i) sum += counts.get(me + i);
    report(seen, G::groupid(), sum);
}

// Every block writes to its own shared memory what the others read after the barrier.
__global__ void cluster_barrier(const __grid_constant__ Output seen, const bool split) {
    shared_allocator<> al(shared_memory());
    sv_fl<32>& own = al.allocate<sv_fl<32>>();
    sv_fl<32>& other = al.allocate<sv_fl<32>>();
    const int rank = kittens::cluster::rank(), blocks = static_cast<int>(arch::cluster_size());
    own.set(laneid(), float(100 * rank + laneid()));
    if (split) {
        kittens::cluster::arrive();
        kittens::cluster::wait();
    } else {
        kittens::cluster::sync();
    }
    load_remote(other, own, (rank + 1) % blocks);
    arch::sync_warp();
    report(seen, rank * 32 + laneid(), other.get(31 - laneid()));
    kittens::cluster::sync();
}
// Every block waits for one arrival of each block of the cluster, itself included.
__global__ void remote_arrivals(const __grid_constant__ Output seen, const int rounds) {
    shared_allocator<> al(shared_memory());
    semaphore& s = al.allocate<semaphore>();
    sv_fl<32>& values = al.allocate<sv_fl<32>>();
    sv_fl<32>& mine = al.allocate<sv_fl<32>>();
    const int rank = kittens::cluster::rank(), blocks = static_cast<int>(arch::cluster_size());
    if (threadIdx.x == 0) {
        init_semaphore(s, blocks);
        arch::mbarrier_init_fence();
    }
    kittens::cluster::sync();
    for (int round = 0; round < rounds; ++round) {
        mine.set(laneid(), float(rank + round));
        arch::sync_warp();
        store_remote(values, mine, (rank + 1) % blocks);
        arch::fence_cluster();
        arch::sync_warp();
        if (threadIdx.x == 0) {
            for (int to = 0; to < blocks; ++to) arrive_remote(s, to);
        }
        wait_cluster(s, round % 2);
        if (round == rounds - 1) report(seen, rank * 32 + laneid(), values.get(laneid()));
        kittens::cluster::sync();
    }
}

// The forms in which a whole group calls, and one thread acts.
template <int WARPS>
__global__ void group_forms(const __grid_constant__ Output seen) {
    using G = group<WARPS>;
    shared_allocator<> al(shared_memory());
    semaphore& s = al.allocate<semaphore>();
    G::init_semaphore(s, 0, 3);
    arch::sync_block();
    G::arrive(s, 2);
    const bool early = test_wait(s, 0);
    arch::sync_block();
    G::arrive(s);
    G::wait(s, 0);
    if (G::laneid() == 0) {
        report(seen, 0, early);
        report(seen, 1, test_wait(s, 0));
    }
    arch::sync_block();
    G::invalidate_semaphore(s);
}

__global__ void __launch_bounds__(384, 1) registers(const __grid_constant__ Output seen) {
    if (warpgroup::groupid() == 0)
        warpgroup::decrease_registers<40>();
    else
        warpgroup::increase_registers<232>();
    report(seen, int(threadIdx.x), float(threadIdx.x));
}

__global__ void first_kernel(const __grid_constant__ Output seen) {
    pdl::arrive();
    arch::sleep(20000);
    report(seen, int(threadIdx.x), float(threadIdx.x));
}
__global__ void second_kernel(const __grid_constant__ Output seen) {
    pdl::wait();
    const int i = int(threadIdx.x);
    report(seen, 64 + i, 2 * arch::load_global(seen.at(elements(0, 63 - i))));
}

Values from(int count, double (*f)(int)) {
    Values values(count);
    for (int i = 0; i < count; ++i) values[i] = f(i);
    return values;
}

template <int WARPS>
void group_cases() {
    for (int groups = 1; groups * WARPS <= 16 && groups <= 4; ++groups) {
        Values rotated;
        for (int i = 0; i < groups * WARPS * 32; ++i) {
            rotated.push_back(4 * ((i % (WARPS * 32) + 32) % (WARPS * 32)));
        }
        sync_case(text("named barriers %d of %s", groups, scope_name(WARPS).c_str()), 1, 1,
                  groups * WARPS * 32, rotated, group_barriers<WARPS>);
        sync_case(text("elect_leader %d of %s", groups, scope_name(WARPS).c_str()), 1, 1,
                  groups * WARPS * 32, Values(groups, 1.0), elected<WARPS>);
    }
    sync_case("group forms " + scope_name(WARPS), 1, 1, WARPS * 32, {0, 1}, group_forms<WARPS>);
}

void semaphores() {
    for (const int arrivals : {1, 2, 33, 128, 1023}) {
        for (const int extra : {0, 1, 5}) {
            for (const int rounds : {1, 2, 5}) {
                Values expected;
                for (int i = 0; i < rounds; ++i) expected.insert(expected.end(), {1, 0, 1, 1});
                sync_case(text("phases %d + %d arrivals, %d rounds", arrivals, extra, rounds), 1, 1,
                          32, expected, phases, arrivals, extra, rounds);
            }
        }
    }
    for (const int bytes : {16, 128, 4080, 4096}) {
        sync_case(text("transactions %d bytes", bytes), 2, 2, 32, {0, 0, bytes / 4 - 1.0, 1},
                  transactions, bytes);
    }
    for (const int stages : {1, 2, 3, 4, 7, 16}) {
        for (const int rounds : {1, 5, 40}) {
            Values expected(32, 0.0);
            for (int lane = 0; lane < 32; ++lane) {
                for (int i = 0; i < rounds; ++i) expected[lane] += (i + 31 - lane) * (i + 1.0);
            }
            sync_case(text("ring of %d, %d rounds", stages, rounds), 1, 1, 64, expected, ring,
                      stages, rounds);
        }
    }
}
void barriers() {
    for_values<1, 2, 4, 8>([](auto warps) { group_cases<decltype(warps)::value>(); });
    sync_case("arrive then sync", 1, 1, 64, from(32, [](int i) { return 31.0 - i; }),
              arrive_then_sync);
    for (const int id : {0, 7}) {
        sync_case(text("everyone::sync %d", id), 1, 1, 256,
                  from(256, [](int i) { return 255.0 - i; }), block_barrier, id);
    }
    sync_case("register reallocation", 1, 1, 384, from(384, [](int i) { return double(i); }),
              registers);
    run("programmatic dependent launch", [](Case& c) {
        float* seen = c.output<float>("seen", 128);
        c.expect(from(128, [](int i) { return i < 64 ? double(i) : 2.0 * (127 - i); }));
        c.launch([&] {
            const auto out = matrix(seen, 1, 128);
            kittens::launch(first_kernel, 1, 64, 1, 0, nullptr, out);
            kittens::launch({.dependent = true}, second_kernel, 1, 64, 1, 0, nullptr, out);
        });
    });
}
void clusters() {
    for (const int blocks : {1, 2, 4, 8}) {
        Values next(blocks * 32), previous(blocks * 32);
        for (const int rounds : {1, 2, 3}) {
            for (int i = 0; i < blocks * 32; ++i) {
                next[i] = 100 * ((i / 32 + 1) % blocks) + 31 - i % 32;
                previous[i] = (i / 32 + blocks - 1) % blocks + rounds - 1;
            }
            sync_case(text("remote arrivals of %d blocks, %d rounds", blocks, rounds), blocks,
                      blocks, 32, previous, remote_arrivals, rounds);
        }
        for (const bool split : {false, true}) {
            sync_case(text("cluster barrier of %d blocks%s", blocks, split ? " split" : ""), blocks,
                      blocks, 32, next, cluster_barrier, split);
        }
    }
}
// An error of a launch is thrown, and then no longer in the way of those that follow.
void launches() {
    run("a launch after one that is refused", [](Case& c) {
        float* seen = c.output<float>("seen", 256);
        c.expect(from(256, [](int i) { return 255.0 - i; }));
        c.launch([&] {
            const auto blocks = [&](int count) {
                kittens::launch(block_barrier, count, 256, 1, 32 * 1024, nullptr,
                                matrix(seen, 1, 256), 0);
            };
            bool refused = false;
            try {
                blocks(0);
            } catch (const std::exception&) {
                refused = true;
            }
            if (!refused) throw std::runtime_error("a grid without blocks was launched");
            blocks(1);
        });
    });
}
const Section launch_section("sync/launches", launches);
const Section semaphore_section("sync/semaphores", semaphores);
const Section barrier_section("sync/barriers", barriers);
const Section cluster_section("sync/clusters", clusters);

}  // namespace
}  // namespace unit
