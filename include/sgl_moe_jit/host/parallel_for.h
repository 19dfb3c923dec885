// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/parallel_for.h: a range of items over threads: torch's own, or ones that live for one call.
//
// torch runs its CPU operations on OpenMP threads that spin for a while after each, on the cores a
// second pool would want: with threads of our own, 64 tokens of hidden 7168 took 375 us alone and
// 895 us in turn with torch operations (2-core EPYC virtual machine, 2026-11-29). So the caller
// hands over the entry point of the OpenMP runtime that torch has loaded. Nothing here links
// OpenMP, which would bring a second one. Where there is none, or after a fork (its threads are
// gone in the child), threads are started for the call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace sgl_moe_jit {
namespace host {

// void GOMP_parallel(fn, data, num_threads, flags): the stable entry of libgomp, also in LLVM's and
// Intel's.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Workers {
  int max_threads;
  OpenMpParallel openmp;  // nullptr: start threads

  Workers(int64_t threads, int64_t openmp_address)
      : max_threads(static_cast<int>(threads)),
        openmp(reinterpret_cast<OpenMpParallel>(static_cast<intptr_t>(openmp_address))) {}
};

// Turns the thread's flush-to-zero off for a scope: torch.set_flush_denormal sets it for one
// thread, and which thread takes which share is chance.
class SubnormalsKept {
 public:
  SubnormalsKept() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero));
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushToZero));
#endif
  }
  ~SubnormalsKept() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" ::"r"(saved_));
#endif
  }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

// Memory traffic that pays for one more thread: some 5 us to wake a waiting one, 20 us to start
// one.
constexpr int64_t kBytesPerWokenThread = 1 << 17;
constexpr int64_t kBytesPerStartedThread = 1 << 20;

// Calls body(begin, end) on disjoint ranges that cover [0, count). body must not throw.
template <typename Body>
void parallel_for(int64_t count, int64_t bytes_per_item, const Workers& workers, const Body& body) {
  const int64_t worth = workers.openmp ? kBytesPerWokenThread : kBytesPerStartedThread;
  const int64_t wanted = std::min<int64_t>(count * bytes_per_item / worth, workers.max_threads);
  const int64_t shares = std::max<int64_t>(1, std::min(wanted, count));
  if (shares == 1) {
    const SubnormalsKept kept;
    return body(0, count);
  }

  struct Work {
    const Body& body;
    int64_t count, shares;
    std::atomic<int64_t> next{0};

    // Takes shares until none is left, so that any number of threads finishes the work.
    static void run(void* self) {
      const SubnormalsKept kept;
      Work& work = *static_cast<Work*>(self);
      for (int64_t i = work.next++; i < work.shares; i = work.next++) {
        work.body(work.count * i / work.shares, work.count * (i + 1) / work.shares);
      }
    }
  } work{body, count, shares};

  if (workers.openmp) {
    workers.openmp(&Work::run, &work, static_cast<unsigned>(shares), 0);
    return;
  }
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(shares - 1));
  try {
    for (int64_t i = 1; i < shares; ++i) helpers.emplace_back(&Work::run, &work);
  } catch (const std::system_error&) {
    // No more threads to be had: those there are finish the work.
  }
  Work::run(&work);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace host
}  // namespace sgl_moe_jit
