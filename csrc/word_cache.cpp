// Cuts texts into segments and remembers the ids of each: the inner loop of megalite/data/sentencepiece_words.py, which
// says why the cuts are safe and has the same rules as a regular expression. The ids themselves come from the library.
//
//     new_segments(texts)  cuts all texts; returns the segments whose ids are not known yet: those that begin a text, and others
//     learn(...)           takes their ids
//     encode()             gives the ids of the texts that were cut last, in one array, and their numbers
//
// Pointers into the tables stay valid while entries are added (node-based maps), and entries are removed only at the start of
// new_segments, so the cut texts can refer to them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

enum Class : uint8_t { kRest, kDigit, kSign, kSpace, kNewline };

struct Entry {
    std::vector<int32_t> ids;
    bool known = false;
};

using Table = std::unordered_map<std::string_view, Entry>;

// One remembered set of segments; the deque owns the text that the keys view.
struct Memory {
    std::deque<std::string> texts;
    Table table;
    size_t bytes = 0;  // an estimate: nodes, keys, and up to one id a byte in the middle

    Entry* find_or_add(std::string_view segment, std::vector<std::string>& fresh) {
        auto found = table.find(segment);
        if (found == table.end()) {
            texts.emplace_back(segment);
            found = table.emplace(texts.back(), Entry{}).first;
            fresh.push_back(texts.back());
            bytes += 160 + 3 * segment.size();
        }
        return &found->second;
    }

    void learn(const std::vector<std::string>& segments, const std::vector<std::vector<int32_t>>& ids, size_t skip) {
        if (segments.size() != ids.size()) throw std::invalid_argument("as many lists of ids as segments are needed");
        for (size_t i = 0; i < segments.size(); ++i) {
            auto found = table.find(segments[i]);
            if (found == table.end() || ids[i].size() < skip) throw std::invalid_argument("a segment that was not asked for");
            found->second.ids.assign(ids[i].begin() + static_cast<std::ptrdiff_t>(skip), ids[i].end());
            found->second.known = true;
        }
    }

    void clear() {
        table.clear();
        texts.clear();
        bytes = 0;
    }
};

// The code point at `at` of valid UTF-8, and its length.
std::pair<uint32_t, size_t> code_point(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[at + i])); };
    const uint32_t first = byte(0);
    if (first < 0x80) return {first, 1};
    if (first < 0xE0) return {(first & 31) << 6 | (byte(1) & 63), 2};
    if (first < 0xF0) return {(first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63), 3};
    return {(first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63), 4};
}

class WordCache {
public:
    WordCache(bool digits_apart, bool signs_apart, size_t max_bytes)
        : digit_(digits_apart ? kDigit : kRest), sign_(signs_apart ? kSign : kRest), max_bytes_(max_bytes) {
        for (uint32_t c = 0; c < 128; ++c) ascii_[c] = classify_ascii(c);
    }

    std::pair<std::vector<std::string>, std::vector<std::string>> new_segments(const std::vector<std::string_view>& texts) {
        if (inside_.bytes + first_.bytes > max_bytes_) {
            inside_.clear();
            first_.clear();
        }
        cut_.clear();
        ends_.clear();
        std::vector<std::string> fresh_first, fresh_inside;
        for (std::string_view text : texts) {
            bool is_first = true;
            for (size_t start = 0; start < text.size(); is_first = false) {
                const size_t end = segment_end(text, start);
                const std::string_view segment = text.substr(start, end - start);
                cut_.push_back(is_first ? first_.find_or_add(segment, fresh_first) : inside_.find_or_add(segment, fresh_inside));
                start = end;
            }
            ends_.push_back(cut_.size());
        }
        return {std::move(fresh_first), std::move(fresh_inside)};
    }

    void learn_first(const std::vector<std::string>& segments, const std::vector<std::vector<int32_t>>& ids) { first_.learn(segments, ids, 0); }

    void learn_inside(const std::vector<std::string>& segments, const std::vector<std::vector<int32_t>>& ids, size_t skip) {
        inside_.learn(segments, ids, skip);
    }

    std::pair<py::array_t<int32_t>, py::array_t<int64_t>> encode() const {
        size_t total = 0;
        for (const Entry* entry : cut_) {
            if (!entry->known) throw std::logic_error("a segment has no ids yet");
            total += entry->ids.size();
        }
        py::array_t<int32_t> ids(static_cast<py::ssize_t>(total));
        py::array_t<int64_t> lengths(static_cast<py::ssize_t>(ends_.size()));
        int32_t* out = ids.mutable_data();
        size_t place = 0;
        for (size_t text = 0; text < ends_.size(); ++text) {
            const int32_t* begun = out;
            for (; place < ends_[text]; ++place) out = std::copy(cut_[place]->ids.begin(), cut_[place]->ids.end(), out);
            lengths.mutable_data()[text] = out - begun;
        }
        return {std::move(ids), std::move(lengths)};
    }

private:
    Class classify_ascii(uint32_t c) const {
        if (c == ' ') return kSpace;
        if (c == '\n') return kNewline;
        if (c >= '0' && c <= '9') return digit_;
        const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        return is_letter ? kRest : sign_;
    }

    Class classify(uint32_t c) const {
        if (c < 128) return ascii_[c];
        const bool is_sign = (c >= 0xA0 && c <= 0xBF) || (c >= 0x2000 && c <= 0x206F) || (c >= 0x3000 && c <= 0x303F);
        return is_sign ? sign_ : kRest;
    }

    // A segment is a run of newlines, or spaces and the run of one other class behind them (perhaps nothing).
    size_t segment_end(std::string_view text, size_t at) const {
        if (text[at] == '\n') return run_end(text, at, kNewline);
        at = run_end(text, at, kSpace);
        if (at == text.size() || text[at] == '\n') return at;
        return run_end(text, at, classify(code_point(text, at).first));
    }

    size_t run_end(std::string_view text, size_t at, Class wanted) const {
        while (at < text.size()) {
            const auto [c, length] = code_point(text, at);
            if (classify(c) != wanted) break;
            at += length;
        }
        return at;
    }

    Class digit_, sign_;
    size_t max_bytes_;
    Class ascii_[128];
    Memory first_, inside_;
    std::vector<const Entry*> cut_;
    std::vector<size_t> ends_;
};

}  // namespace

PYBIND11_MODULE(_word_cache, m) {
    m.doc() = "Segments of texts and their remembered ids; see megalite/data/sentencepiece_words.py.";
    py::class_<WordCache>(m, "WordCache")
        .def(py::init<bool, bool, size_t>(), py::arg("digits_apart"), py::arg("signs_apart"), py::arg("max_bytes"))
        .def("new_segments", &WordCache::new_segments, py::arg("texts"))
        .def("learn_first", &WordCache::learn_first, py::arg("segments"), py::arg("ids"))
        .def("learn_inside", &WordCache::learn_inside, py::arg("segments"), py::arg("ids"), py::arg("skip"))
        .def("encode", &WordCache::encode);
}
