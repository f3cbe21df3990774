// Index arrays of the training data, built at C++ speed: the Python bindings.
//
// Each function equals its `*_reference` in megalite/data/index_builder.py (the shuffle: numpy.random.RandomState), which
// says what the results mean; tests hold the two equal. All counters are int64 (a corpus passes 2^31 tokens early), every index is checked
// before it is used, the GIL is free while a loop runs, and a wrong argument becomes a ValueError.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "blend.hpp"
#include "sample_index.hpp"
#include "shuffle.hpp"

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
void require_one_dim(const Array<T>& array, const char* name) {
    if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
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
        SampleWalk<Size, Document, std::remove_pointer_t<decltype(out)>>(size_data, num_sizes, document_data, num_documents,
                                                                        seq_length, num_samples, add_extra_token, out)
            .run();
        return std::move(result);
    };
    if (wide) return fill(Array<int64_t>(shape));
    return fill(Array<int32_t>(shape));
}

py::tuple blend(const std::vector<double>& weights, const std::vector<int64_t>& limits, int64_t size) {
    if (weights.empty() || weights.size() > static_cast<size_t>(std::numeric_limits<int16_t>::max()))
        throw std::invalid_argument("a blend needs 1 to 32767 datasets, not " + std::to_string(weights.size()));
    if (size < 0) throw std::invalid_argument("the size of a blend must not be negative");
    for (const double weight : weights) {
        if (!(weight >= 0.0 && std::isfinite(weight)))
            throw std::invalid_argument("a weight is " + std::to_string(weight) + "; it must be a number of 0 or more");
    }
    Array<int16_t> dataset_index(size);
    Array<int64_t> sample_index(size);
    auto* dataset_out = dataset_index.mutable_data();
    auto* sample_out = sample_index.mutable_data();
    {
        py::gil_scoped_release unlocked;
        Blend(weights, limits).fill(size, dataset_out, sample_out);
    }
    return py::make_tuple(dataset_index, sample_index);
}

py::tuple build_blending_indices(const std::vector<double>& weights, int64_t size) { return blend(weights, {}, size); }

py::tuple build_exhaustive_blending_indices(const std::vector<int64_t>& sizes) {
    int64_t total = 0;
    for (const int64_t size : sizes) {
        if (size < 0) throw std::invalid_argument("the size of a dataset must not be negative");
        total += size;
    }
    std::vector<double> weights;
    for (const int64_t size : sizes)
        weights.push_back(static_cast<double>(size) / static_cast<double>(std::max<int64_t>(total, 1)));
    return blend(weights, sizes, total);
}

template <typename T>
void shuffle(LegacyRandom& random, Array<T>& values) {
    require_one_dim(values, "values");
    auto* data = values.mutable_data();  // throws for an array that must not be written
    const int64_t size = values.size();
    py::gil_scoped_release unlocked;
    random.shuffle(data, size);
}

template <typename Size, typename Document>
void bind_sample_index(py::module_& module) {
    module.def("build_sample_index", &build_sample_index<Size, Document>, py::arg("sizes").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"),
               py::arg("add_extra_token"));
}

PYBIND11_MODULE(_index_builder, module) {
    module.doc() = "Sample and blending indices and their shuffle; see megalite.data.index_builder.";
    bind_sample_index<int32_t, int32_t>(module);
    bind_sample_index<int32_t, int64_t>(module);
    bind_sample_index<int64_t, int32_t>(module);
    bind_sample_index<int64_t, int64_t>(module);
    module.def("build_blending_indices", &build_blending_indices, py::arg("weights"), py::arg("size"));
    module.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices, py::arg("sizes"));
    py::class_<LegacyRandom>(module, "LegacyRandom")
        .def(py::init<uint32_t>(), py::arg("seed"))
        .def("shuffle", &shuffle<int32_t>, py::arg("x").noconvert())
        .def("shuffle", &shuffle<uint32_t>, py::arg("x").noconvert())
        .def("shuffle", &shuffle<int64_t>, py::arg("x").noconvert());
}
