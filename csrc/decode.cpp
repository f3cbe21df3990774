// One decoding step of a whole model on a CPU: the newest token of every row through all layers.
//
// A step on few rows reads every weight once and computes little, so it should last as long as reading them does. Composed of torch's
// operations, thirty per layer, half of the time goes into calling them. Here a step is one call. Python keeps all memory (weights, the
// cache, the tables of rotations) and hands over addresses; megalite/generation/native.py checks that they are what is expected here.
//
// Threads: a team that waits between steps. In a step it goes through phases (a product, or the attention of all heads) that begin when the
// one before is complete. A phase's work is taken in parts by whoever is there, so a thread that lost its processor holds up no more than
// the part that it has taken. Who waits spins first, then gives its processor away.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cfloat>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLE
#endif
#endif

typedef float v16 __attribute__((vector_size(64)));
struct bf16 {
    std::uint16_t bits;
};

enum class Activation { swiglu, gelu, gelu_tanh, relu_squared };

struct Layer {
    const float *attention_norm, *attention_norm_bias, *qkv_bias, *q_norm, *k_norm, *out_bias;
    const float *mlp_norm, *mlp_norm_bias, *up_bias, *down_bias;
    const void *qkv, *out, *up, *down;
};

struct Model {
    int hidden = 0, heads = 0, groups = 0, head_dim = 0, half = 0, ffn = 0, vocab = 0, window = 0;
    bool gated = false, centred = false;
    Activation activation = Activation::swiglu;
    float epsilon = 0;
    std::vector<Layer> layers;
    const void *word = nullptr, *head = nullptr;
    const float *position = nullptr, *norm = nullptr, *norm_bias = nullptr, *cos = nullptr, *sin = nullptr;
};

struct CachePart {
    void *keys, *values;
    float *key_scales, *value_scales;
};

struct Work {
    std::vector<float> x, qkv, attended, hidden;
    std::vector<std::vector<float>> normed, scores;  // of each thread

    void fit(const Model &m, std::size_t rows, std::size_t slots, int threads) {
        x.resize(rows * m.hidden);
        qkv.resize(rows * (m.heads + 2 * m.groups) * m.head_dim);
        attended.resize(rows * m.heads * m.head_dim);
        hidden.resize(rows * m.ffn);
        normed.resize(threads);
        scores.resize(threads);
        for (auto &own : normed) own.resize(rows * m.hidden);
        for (auto &own : scores) own.resize(slots + 16);
    }
};

struct alignas(64) Phase {
    std::atomic<int> taken{0}, done{0};
};

struct Step {
    std::vector<std::int64_t> tokens, positions;
    const std::vector<CachePart> &cache;
    std::int64_t slots;
    float *logits;
    Work *work;
    Phase *phases;
};

class Team {
  public:
    const int size;

    explicit Team(int size) : size(size) {
        for (int thread = 1; thread < size; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ended_ = true;
            ++round_;
        }
        begin_.notify_all();
        for (auto &thread : threads_) thread.join();
    }

    // work(thread) on all threads; over when none is in it any more
    void run(std::function<void(int)> work) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = std::move(work);
            busy_.store(size - 1, std::memory_order_relaxed);
            ++round_;
        }
        begin_.notify_all();
        work_(0);
        until([&] { return busy_.load(std::memory_order_acquire) == 0; });
    }

    // body(begin, end) for parts of 0 .. total, some of them here; returns when all of them are done
    template <class Body> void share(Phase &phase, int total, int part, Body body) {
        for (int begin; (begin = phase.taken.fetch_add(part, std::memory_order_relaxed)) < total;) {
            int end = begin + part < total ? begin + part : total;
            body(begin, end);
            phase.done.fetch_add(end - begin, std::memory_order_release);
        }
        until([&] { return phase.done.load(std::memory_order_acquire) == total; });
    }

    // four parts for every thread, of whole blocks of rows
    int part(int total) const { return size == 1 ? total : (total / (4 * size) + 16) / 16 * 16; }

  private:
    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }

    template <class Condition> static void until(Condition condition) {
        for (int turns = 0; !condition(); ++turns) {
            if (turns < 2000) pause();
            else std::this_thread::yield();
        }
    }

    void serve(int thread) {
        for (long seen = 0;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                begin_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (ended_) return;
            }
            work_(thread);
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable begin_;
    std::function<void(int)> work_;
    long round_ = 0;
    bool ended_ = false;
    std::atomic<int> busy_{0};
};

namespace plain {
#include "decode_kernels.hpp"
}
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "decode_kernels.hpp"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
namespace avx512 {
#include "decode_kernels.hpp"
}
#pragma GCC pop_options
#endif

typedef void (*Run)(const Model &, const Step &, Team &, int);

template <class W, class C> Run find_run() {
#ifdef HAS_X86_VARIANTS
    bool has_avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) return avx512::run<W, C>;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::run<W, C>;
#endif
    return plain::run<W, C>;
}

Run find_run(const std::string &weights, const std::string &cache) {
    if (weights == "float32" && cache == "float32") return find_run<float, float>();
    if (weights == "float32" && cache == "int8") return find_run<float, std::int8_t>();
    if (weights == "bfloat16" && cache == "bfloat16") return find_run<bf16, bf16>();
    if (weights == "bfloat16" && cache == "int8") return find_run<bf16, std::int8_t>();
    throw std::invalid_argument("no step for " + weights + " weights and a " + cache + " cache");
}

template <class T> T *at(std::uintptr_t address) { return reinterpret_cast<T *>(address); }

class Stepper {
  public:
    Stepper(const std::string &weights, const py::dict &sizes, const std::string &activation, bool centred, float epsilon, int threads)
        : weights_(weights), team_(threads < 1 ? 1 : threads) {
        auto size = [&](const char *name) { return sizes[name].cast<int>(); };
        m_.hidden = size("hidden"), m_.heads = size("heads"), m_.groups = size("groups"), m_.head_dim = size("head_dim");
        m_.half = size("half"), m_.ffn = size("ffn"), m_.vocab = size("vocab"), m_.window = size("window");
        m_.gated = activation == "swiglu", m_.centred = centred, m_.epsilon = epsilon;
        if (activation == "gelu") m_.activation = Activation::gelu;
        else if (activation == "gelu_tanh") m_.activation = Activation::gelu_tanh;
        else if (activation == "relu_squared") m_.activation = Activation::relu_squared;
        else if (activation != "swiglu") throw std::invalid_argument("activation " + activation + " is unknown");
    }

    // addresses by name, 0 where there is nothing
    void add_layer(const py::dict &a) {
        auto number = [&](const char *name) { return at<const float>(a[name].cast<std::uintptr_t>()); };
        Layer layer;
        layer.attention_norm = number("attention_norm"), layer.attention_norm_bias = number("attention_norm_bias");
        layer.qkv_bias = number("qkv_bias"), layer.q_norm = number("q_norm"), layer.k_norm = number("k_norm");
        layer.out_bias = number("out_bias"), layer.mlp_norm = number("mlp_norm"), layer.mlp_norm_bias = number("mlp_norm_bias");
        layer.up_bias = number("up_bias"), layer.down_bias = number("down_bias");
        layer.qkv = number("qkv"), layer.out = number("out"), layer.up = number("up"), layer.down = number("down");
        m_.layers.push_back(layer);
    }

    void set_ends(const py::dict &a) {
        auto number = [&](const char *name) { return at<const float>(a[name].cast<std::uintptr_t>()); };
        m_.word = number("word"), m_.head = number("head"), m_.position = number("position");
        m_.norm = number("norm"), m_.norm_bias = number("norm_bias");
    }

    // cache: of every layer the addresses of keys, values and their scales (0 where there are none), [rows, K, slots, D];
    // cos, sin: [positions, half]; logits: room for [rows, vocab]
    void step(const std::vector<std::int64_t> &tokens, const std::vector<std::int64_t> &positions, const std::string &cache_type,
              const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>> &cache, std::int64_t slots,
              std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t logits) {
        if (tokens.size() != positions.size() || cache.size() != m_.layers.size()) throw std::invalid_argument("sizes differ");
        Run run = find_run(weights_, cache_type);
        std::vector<CachePart> parts;
        for (auto &[keys, values, key_scales, value_scales] : cache)
            parts.push_back({at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales)});
        py::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(mutex_);
        m_.cos = at<const float>(cos), m_.sin = at<const float>(sin);
        work_.fit(m_, tokens.size(), slots, team_.size);
        std::vector<Phase> phases(m_.layers.size() * 5 + 2);
        Step s{tokens, positions, parts, slots, at<float>(logits), &work_, phases.data()};
        team_.run([&](int thread) { run(m_, s, team_, thread); });
    }

  private:
    std::string weights_;
    Model m_;
    Work work_;
    Team team_;
    std::mutex mutex_;
};

PYBIND11_MODULE(_decode, module) {
    module.doc() = "One decoding step of a whole model on a CPU; see megalite/generation/native.py.";
    py::class_<Stepper>(module, "Stepper")
        .def(py::init<const std::string &, const py::dict &, const std::string &, bool, float, int>())
        .def("add_layer", &Stepper::add_layer)
        .def("set_ends", &Stepper::set_ends)
        .def("step", &Stepper::step);
}
