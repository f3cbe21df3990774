// Index arrays of the training data, built at C speed: which tokens make a sample, and which dataset gives the next one.
//
// Each function equals its `*_reference` in megalite/data/index_builder.py, which says what the results mean; a test holds
// the two equal. All counters are int64 (a corpus passes 2^31 tokens early), every index is checked before it is used, the
// GIL is free while a loop runs, and a wrong argument becomes a ValueError.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

template <typename T>
void require_one_dim(const Array<T>& array, const char* name) {
    if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
}

// Walks the documents in order and writes the [num_samples + 1, 2] borders (position in document_index, token offset).
template <typename Size, typename Document, typename Out>
void walk_samples(const Size* sizes, int64_t num_sizes, const Document* documents, int64_t num_documents,
                  int64_t seq_length, int64_t num_samples, int64_t extra, Out* out) {
    const auto size_at = [&](int64_t position) {
        const int64_t document = documents[position];
        if (document < 0 || document >= num_sizes)
            throw std::invalid_argument("document_index[" + std::to_string(position) + "] is " +
                                        std::to_string(document) + ", but there are " + std::to_string(num_sizes) +
                                        " sizes");
        const int64_t size = sizes[document];
        if (size < 0) throw std::invalid_argument("the size of document " + std::to_string(document) + " is negative");
        return size;
    };
    int64_t position = 0, offset = 0;
    *out++ = 0;
    *out++ = 0;
    for (int64_t sample = 0; sample < num_samples; ++sample) {
        int64_t need = seq_length + extra;
        while (true) {
            const int64_t available = size_at(position) - offset;
            if (need <= available) {
                offset += need - extra;  // the extra token is read again as the first of the next sample
                break;
            }
            if (position == num_documents - 1) {  // the data ends inside this sample: it stays short
                offset = size_at(position) - extra;
                break;
            }
            need -= available;
            ++position;
            offset = 0;
        }
        *out++ = static_cast<Out>(position);
        *out++ = static_cast<Out>(offset);
    }
}

template <typename Size, typename Document>
py::array build_sample_index(const Array<Size>& sizes, const Array<Document>& document_index, int64_t seq_length,
                             int64_t num_samples, bool add_extra_token) {
    require_one_dim(sizes, "sizes");
    require_one_dim(document_index, "document_index");
    if (seq_length < 1) throw std::invalid_argument("seq_length must be at least 1");
    if (num_samples < 0) throw std::invalid_argument("num_samples must not be negative");
    if (num_samples > 0 && document_index.size() == 0) throw std::invalid_argument("document_index is empty");
    const int64_t num_sizes = sizes.size(), num_documents = document_index.size();
    const auto* size_data = sizes.data();
    const auto* document_data = document_index.data();
    const bool wide = num_documents > kInt32Max ||
                      (num_sizes > 0 && int64_t{*std::max_element(size_data, size_data + num_sizes)} > kInt32Max);
    const std::vector<py::ssize_t> shape{num_samples + 1, 2};
    const auto fill = [&](auto result) -> py::array {
        auto* out = result.mutable_data();
        py::gil_scoped_release unlocked;
        walk_samples(size_data, num_sizes, document_data, num_documents, seq_length, num_samples,
                     int64_t{add_extra_token}, out);
        return std::move(result);
    };
    if (wide) return fill(Array<int64_t>(shape));
    return fill(Array<int32_t>(shape));
}

// The next dataset is the one furthest below its share; ties go to the lowest number. The product passes through memory
// because a fused multiply-add, which some compilers emit, rounds differently and would break ties another way.
template <typename Allowed>
int64_t furthest_behind(const double* weights, const int64_t* taken, int64_t num_datasets, int64_t step,
                        const Allowed& allowed) {
    const double position = static_cast<double>(std::max<int64_t>(step, 1));
    int64_t best = -1;
    double best_error = 0.0;
    for (int64_t k = 0; k < num_datasets; ++k) {
        if (!allowed(k)) continue;
        const volatile double wanted = weights[k] * position;
        const double error = wanted - static_cast<double>(taken[k]);
        if (best < 0 || error > best_error) {
            best = k;
            best_error = error;
        }
    }
    return best;
}

template <typename Allowed>
py::tuple blend(const std::vector<double>& weights, int64_t size, const Allowed& make_allowed) {
    const auto num_datasets = static_cast<int64_t>(weights.size());
    if (num_datasets == 0 || num_datasets > std::numeric_limits<int16_t>::max())
        throw std::invalid_argument("a blend needs 1 to 32767 datasets, not " + std::to_string(num_datasets));
    if (size < 0) throw std::invalid_argument("the size of a blend must not be negative");
    Array<int16_t> dataset_index(size);
    Array<int64_t> sample_index(size);
    auto* dataset_out = dataset_index.mutable_data();
    auto* sample_out = sample_index.mutable_data();
    {
        py::gil_scoped_release unlocked;
        std::vector<int64_t> taken(weights.size(), 0);
        const auto allowed = make_allowed(taken);
        for (int64_t step = 0; step < size; ++step) {
            const int64_t k = furthest_behind(weights.data(), taken.data(), num_datasets, step, allowed);
            dataset_out[step] = static_cast<int16_t>(k);
            sample_out[step] = taken[k]++;
        }
    }
    return py::make_tuple(dataset_index, sample_index);
}

py::tuple build_blending_indices(const std::vector<double>& weights, int64_t size) {
    return blend(weights, size, [](const std::vector<int64_t>&) { return [](int64_t) { return true; }; });
}

py::tuple build_exhaustive_blending_indices(const std::vector<int64_t>& sizes) {
    int64_t total = 0;
    for (const int64_t size : sizes) {
        if (size < 0) throw std::invalid_argument("the size of a dataset must not be negative");
        total += size;
    }
    std::vector<double> weights;
    for (const int64_t size : sizes) weights.push_back(static_cast<double>(size) / static_cast<double>(total));
    return blend(weights, total, [&sizes](const std::vector<int64_t>& taken) {
        return [&sizes, &taken](int64_t k) { return taken[k] < sizes[k]; };
    });
}

template <typename Size, typename Document>
void bind_sample_index(py::module_& module) {
    module.def("build_sample_index", &build_sample_index<Size, Document>, py::arg("sizes").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"),
               py::arg("add_extra_token"));
}

PYBIND11_MODULE(_index_builder, module) {
    module.doc() = "Sample and blending indices; see megalite.data.index_builder.";
    bind_sample_index<int32_t, int32_t>(module);
    bind_sample_index<int32_t, int64_t>(module);
    bind_sample_index<int64_t, int32_t>(module);
    bind_sample_index<int64_t, int64_t>(module);
    module.def("build_blending_indices", &build_blending_indices, py::arg("weights"), py::arg("size"));
    module.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices, py::arg("sizes"));
}
