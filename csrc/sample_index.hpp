// Cutting documents, laid end to end, into samples: the borders of megalite/data/index_builder.py.
//
// The sizes of documents in shuffled order are a random walk through memory, which is what this costs. Blocks of documents
// are therefore shared by threads: each collects the sizes of a block (fetched ahead), learns from its predecessor at which
// token the block starts, tells its successor, and then writes the borders that fall into the block. Every border is written
// once, at its own place, so the result does not depend on the number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

template <typename Size, typename Document, typename Out>
class SampleWalk {
public:
    SampleWalk(const Size* sizes, int64_t num_sizes, const Document* documents, int64_t num_documents, int64_t seq_length,
               int64_t num_samples, bool extra, Out* out)
        : sizes_(sizes), num_sizes_(num_sizes), documents_(documents), num_documents_(num_documents),
          seq_length_(seq_length), num_samples_(num_samples), extra_(extra), out_(out),
          starts_((num_documents + kBlock - 1) / kBlock + 1) {}

    // Throws std::invalid_argument for a document that does not exist or has a negative size.
    void run() {
        out_[0] = out_[1] = 0;
        if (num_samples_ == 0) return;
        for (auto& start : starts_) start.store(kUnknown, std::memory_order_relaxed);
        starts_[0].store(0, std::memory_order_relaxed);
        std::vector<std::thread> helpers;
        for (int64_t n = 1; n < num_threads(); ++n) {
            try {
                helpers.emplace_back([this] { work(); });
            } catch (const std::system_error&) {
                break;  // the system gives no more threads: fewer do the same
            }
        }
        work();
        for (auto& helper : helpers) helper.join();
        if (bad_position_.load() != kNone) throw std::invalid_argument(complaint(bad_position_.load()));
        finish();
    }

private:
    static constexpr int64_t kBlock = 1 << 14, kAhead = 32, kUnknown = -1, kNone = std::numeric_limits<int64_t>::max();
    static constexpr int64_t kMaxThreads = 8, kBlocksPerThread = 16;

    int64_t num_threads() const {
        const int64_t useful = static_cast<int64_t>(starts_.size()) / kBlocksPerThread;
        return std::max<int64_t>(1, std::min<int64_t>({kMaxThreads, useful, std::thread::hardware_concurrency()}));
    }

    void work() {
        std::vector<int64_t> lengths(kBlock);
        const auto num_blocks = static_cast<int64_t>(starts_.size()) - 1;
        for (int64_t block = next_block_++; block < num_blocks; block = next_block_++) {
            const int64_t first = block * kBlock, count = std::min(kBlock, num_documents_ - first);
            const int64_t total = collect(first, count, lengths.data());
            int64_t start;
            while ((start = starts_[block].load(std::memory_order_acquire)) == kUnknown) std::this_thread::yield();
            starts_[block + 1].store(start + total, std::memory_order_release);
            write(first, count, lengths.data(), start);
        }
    }

    // The lengths of `count` documents from position `first`, and their sum; 0 for those that cannot be, which are noted.
    int64_t collect(int64_t first, int64_t count, int64_t* lengths) {
        int64_t total = 0;
        for (int64_t n = 0; n < count; ++n) {
#if defined(__GNUC__)
            if (n + kAhead < count) {
                const int64_t later = documents_[first + n + kAhead];
                if (later >= 0 && later < num_sizes_) __builtin_prefetch(sizes_ + later);
            }
#endif
            const int64_t document = documents_[first + n];
            const int64_t length = document < 0 || document >= num_sizes_ ? -1 : int64_t{sizes_[document]};
            if (length < 0) note_bad(first + n);
            lengths[n] = std::max<int64_t>(length, 0);
            total += lengths[n];
        }
        return total;
    }

    // Border n is token n * seq_length of the stream. With an extra token it belongs to the document that holds this token,
    // without one to the document that holds the token before it.
    void write(int64_t first, int64_t count, const int64_t* lengths, int64_t start) {
        const int64_t shift = extra_ ? 0 : 1;
        int64_t border = std::max<int64_t>(1, (start + shift + seq_length_ - 1) / seq_length_);
        int64_t token = border * seq_length_;
        for (int64_t n = 0; n < count && border <= num_samples_; ++n) {
            const int64_t end = start + lengths[n];
            for (; token < end + shift && border <= num_samples_; ++border, token += seq_length_) {
                out_[2 * border] = static_cast<Out>(first + n);
                out_[2 * border + 1] = static_cast<Out>(token - start);
            }
            start = end;
        }
    }

    // Samples after the end of the data stay short: their border is the end of the last document.
    void finish() {
        const int64_t total = starts_.back().load(), usable = extra_ ? total - 1 : total;
        const int64_t last = num_documents_ - 1, length = sizes_[documents_[last]];
        for (int64_t border = std::max<int64_t>(usable, 0) / seq_length_ + 1; border <= num_samples_; ++border) {
            out_[2 * border] = static_cast<Out>(last);
            out_[2 * border + 1] = static_cast<Out>(length - extra_);
        }
    }

    void note_bad(int64_t position) {
        int64_t known = bad_position_.load();
        while (position < known && !bad_position_.compare_exchange_weak(known, position)) {}
    }

    std::string complaint(int64_t position) const {
        const int64_t document = documents_[position];
        if (document >= 0 && document < num_sizes_) return "the size of document " + std::to_string(document) + " is negative";
        return "document_index[" + std::to_string(position) + "] is " + std::to_string(document) + ", but there are " +
               std::to_string(num_sizes_) + " sizes";
    }

    const Size* sizes_;
    int64_t num_sizes_;
    const Document* documents_;
    int64_t num_documents_, seq_length_, num_samples_;
    bool extra_;
    Out* out_;
    std::vector<std::atomic<int64_t>> starts_;  // first token of each block, and of what follows the last one
    std::atomic<int64_t> next_block_{0}, bad_position_{kNone};
};
