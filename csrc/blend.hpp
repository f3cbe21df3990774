// Which dataset gives the next sample of a blend: the one furthest below its share.
//
// At step i dataset k is behind by weights[k] * max(i, 1) - taken[k], a double; the largest wins, ties go to the lowest number.
// Each step needs the counts that the one before it left, so plainly done it is a chain of num_datasets * size comparisons.
//
// The chain is cut by guessing. After M steps every dataset has given nearly its share, weights[k] * M rounded down or up, so
// the counts after M steps can be guessed almost exactly without taking the steps. The steps are divided into chunks, every
// chunk starts from a guess, and chunks are computed side by side: some per thread, and those of a thread in the lanes of vector
// registers. Then the guesses are checked in order. Where the true counts differ from the guess, steps are taken again from
// the true ones until both runs have the same counts; from there on the rest of the chunk is what it should be. The rule gives
// more to whoever has too little, so that takes a few dozen steps. If it never happens, the whole chunk is taken again: a
// bad guess costs time and nothing else. Values are computed by the same two operations as ever, a product and a
// difference, each rounded to double (the build switches fused operations off).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEGALITE_AVX2 __attribute__((target("avx2")))
#endif

constexpr int64_t kLanes = 16;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUsedUp = 0x1p1000;  // the count of a dataset that has nothing left: its value is far below all others

// best[lane] is the dataset with the largest value at position[lane], the lowest one of several. `counts` is [dataset, lane].
inline void best_in_lanes(const double* weights, int64_t num_datasets, const double* counts, const double* position, double* best) {
    double largest[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = -kInfinity;
    for (int64_t k = 0; k < num_datasets; ++k, counts += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const double value = weights[k] * position[lane] - counts[lane];
            best[lane] = value > largest[lane] ? static_cast<double>(k) : best[lane];
            largest[lane] = value > largest[lane] ? value : largest[lane];
        }
    }
}

#ifdef MEGALITE_AVX2
MEGALITE_AVX2 inline void best_in_lanes_avx2(const double* weights, int64_t num_datasets, const double* counts, const double* position,
                                             double* best) {
    constexpr int kVectors = kLanes / 4;
    const __m256d one = _mm256_set1_pd(1.0);
    __m256d position4[kVectors], largest4[kVectors], best4[kVectors], number = _mm256_setzero_pd();
    for (int v = 0; v < kVectors; ++v) {
        position4[v] = _mm256_loadu_pd(position + 4 * v);
        largest4[v] = _mm256_set1_pd(-kInfinity);
        best4[v] = number;
    }
    for (int64_t k = 0; k < num_datasets; ++k, counts += kLanes) {
        const __m256d weight = _mm256_set1_pd(weights[k]);
        for (int v = 0; v < kVectors; ++v) {
            const __m256d value = _mm256_sub_pd(_mm256_mul_pd(weight, position4[v]), _mm256_loadu_pd(counts + 4 * v));
            best4[v] = _mm256_blendv_pd(best4[v], number, _mm256_cmp_pd(value, largest4[v], _CMP_GT_OQ));
            largest4[v] = _mm256_max_pd(value, largest4[v]);
        }
        number = _mm256_add_pd(number, one);
    }
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_pd(best + 4 * v, best4[v]);
}
#endif

class Blend {
public:
    // `limits`: samples that each dataset has, or empty for no limit. Weights are finite and not negative.
    Blend(const std::vector<double>& weights, const std::vector<int64_t>& limits)
        : weights_(weights), limits_(weights.size(), kUsedUp), taken_(weights.size(), 0) {
        for (size_t k = 0; k < limits.size(); ++k) limits_[k] = static_cast<double>(limits[k]);
    }

    // Writes the dataset and its sample number for every step; the limits allow so many steps.
    void fill(int64_t num_steps, int16_t* dataset_out, int64_t* sample_out) {
        dataset_out_ = dataset_out;
        sample_out_ = sample_out;
        const int64_t chunks_possible = num_steps / std::max<int64_t>(kLeastChunk, 4 * num_datasets());
        const int64_t num_groups =
            std::min<int64_t>({kMaxThreads, std::max<int64_t>(1, std::thread::hardware_concurrency()), chunks_possible / kLanes});
        int64_t step = 0;
        if (num_groups > 0) {
            const int64_t chunk = num_steps / (num_groups * kLanes);
            std::vector<std::vector<double>> guesses(num_groups);
            take_groups(guesses, chunk);
            for (int64_t n = 0; n < num_groups * kLanes; ++n) step = check_chunk(n * chunk, (n + 1) * chunk, guesses[n / kLanes], n % kLanes);
        }
        while (step < num_steps) take_step(step++);
    }

private:
    static constexpr int64_t kLeastChunk = 128, kMaxThreads = 8;

    int64_t num_datasets() const { return static_cast<int64_t>(weights_.size()); }

    static double position(int64_t step) { return static_cast<double>(std::max<int64_t>(step, 1)); }

    double counted(int64_t k, int64_t taken) const {
        const auto count = static_cast<double>(taken);  // below 2^53, so it is exact
        return count == limits_[k] ? kUsedUp : count;
    }

    int64_t next_dataset(int64_t step) const {
        double largest = -kInfinity;
        int64_t best = 0;
        for (int64_t k = 0; k < num_datasets(); ++k) {
            const double value = weights_[k] * position(step) - counted(k, taken_[k]);
            if (value > largest) {
                largest = value;
                best = k;
            }
        }
        return best;
    }

    void take_step(int64_t step) {
        const int64_t k = next_dataset(step);
        dataset_out_[step] = static_cast<int16_t>(k);
        sample_out_[step] = taken_[k]++;
    }

    // Chunks from guessed counts; one thread for kLanes of them. `guesses` receives the guesses, [dataset, lane] of each group.
    void take_groups(std::vector<std::vector<double>>& guesses, int64_t chunk) {
        const auto take_group = [&](int64_t group) {
            std::vector<double>& guess = guesses[group];
            guess.resize(num_datasets() * kLanes);
            int64_t first_steps[kLanes];
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                first_steps[lane] = (group * kLanes + lane) * chunk;
                guess_counts(first_steps[lane], guess, lane);
            }
            std::vector<double> counts = guess;
            take_steps_in_lanes(first_steps, chunk, counts.data());
        };
        std::vector<std::thread> helpers;
        int64_t group = 1;
        for (; group < static_cast<int64_t>(guesses.size()); ++group) {
            try {
                helpers.emplace_back(take_group, group);
            } catch (const std::system_error&) {
                break;  // the system gives no more threads: this one takes the rest
            }
        }
        take_group(0);
        for (; group < static_cast<int64_t>(guesses.size()); ++group) take_group(group);
        for (auto& helper : helpers) helper.join();
    }

    // Takes `num_steps` steps from each of kLanes first steps, all lanes alike. `counts` is [dataset, lane].
    void take_steps_in_lanes(const int64_t* first_steps, int64_t num_steps, double* counts) const {
        auto find_best = best_in_lanes;
#ifdef MEGALITE_AVX2
        if (__builtin_cpu_supports("avx2")) find_best = best_in_lanes_avx2;
#endif
        double positions[kLanes], best[kLanes];
        for (int64_t n = 0; n < num_steps; ++n) {
            for (int64_t lane = 0; lane < kLanes; ++lane) positions[lane] = position(first_steps[lane] + n);
            find_best(weights_.data(), num_datasets(), counts, positions, best);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const auto k = static_cast<int64_t>(best[lane]);
                double& count = counts[k * kLanes + lane];
                dataset_out_[first_steps[lane] + n] = static_cast<int16_t>(k);
                sample_out_[first_steps[lane] + n] = static_cast<int64_t>(count);
                count = count + 1.0 == limits_[k] ? kUsedUp : count + 1.0;
            }
        }
    }

    // Each share rounded down, and one more for those with the largest remainders until there are `step` in all.
    void guess_counts(int64_t step, std::vector<double>& guess, int64_t lane) const {
        std::vector<std::pair<double, int64_t>> remainders;
        int64_t missing = step;
        for (int64_t k = 0; k < num_datasets(); ++k) {
            const double share = weights_[k] * static_cast<double>(step), whole = std::floor(share);
            guess[k * kLanes + lane] = whole;
            missing -= static_cast<int64_t>(std::min(whole, 0x1p53));
            remainders.emplace_back(whole - share, k);
        }
        std::sort(remainders.begin(), remainders.end());
        for (int64_t n = 0; n < std::min(missing, num_datasets()); ++n) guess[remainders[n].second * kLanes + lane] += 1.0;
        for (int64_t k = 0; k < num_datasets(); ++k) {
            double& count = guess[k * kLanes + lane];
            if (count == limits_[k]) count = kUsedUp;
        }
    }

    // Makes the steps from `step` to `end`, which were taken from a guess, what they are from the true counts; returns `end`.
    int64_t check_chunk(int64_t step, int64_t end, const std::vector<double>& guess, int64_t lane) {
        std::vector<double> guessed(num_datasets());
        int64_t num_different = 0;
        for (int64_t k = 0; k < num_datasets(); ++k) {
            guessed[k] = guess[k * kLanes + lane];
            num_different += guessed[k] != counted(k, taken_[k]);
        }
        for (; step < end && num_different > 0; ++step) {
            const int64_t other = dataset_out_[step];
            num_different -= guessed[other] != counted(other, taken_[other]);
            guessed[other] = guessed[other] + 1.0 == limits_[other] ? kUsedUp : guessed[other] + 1.0;
            num_different += guessed[other] != counted(other, taken_[other]);
            const int64_t k = next_dataset(step);
            num_different -= guessed[k] != counted(k, taken_[k]);
            take_step(step);
            num_different += guessed[k] != counted(k, taken_[k]);
        }
        for (; step < end; ++step) ++taken_[dataset_out_[step]];
        return end;
    }

    std::vector<double> weights_, limits_;
    std::vector<int64_t> taken_;
    int16_t* dataset_out_ = nullptr;
    int64_t* sample_out_ = nullptr;
};
