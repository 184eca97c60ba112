#include "base/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/check.hpp"
#include "base/half.hpp"

namespace statepack {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian");

constexpr std::size_t kMaxHeaderBytes = 100'000'000;  // as the format's own library
constexpr int kMaxDepth = 16;
constexpr std::size_t kMaxDims = 16;
constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();
constexpr const char* kDamaged = "; the file is damaged: download or convert it again";

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t n_bytes;
};
constexpr std::array<DTypeInfo, 10> kDTypes{{{DType::kF64, "F64", 8},
                                             {DType::kF32, "F32", 4},
                                             {DType::kF16, "F16", 2},
                                             {DType::kBF16, "BF16", 2},
                                             {DType::kI64, "I64", 8},
                                             {DType::kI32, "I32", 4},
                                             {DType::kI16, "I16", 2},
                                             {DType::kI8, "I8", 1},
                                             {DType::kU8, "U8", 1},
                                             {DType::kBool, "BOOL", 1}}};

const DTypeInfo& info_of(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  SP_CHECK(index < kDTypes.size() && kDTypes[index].dtype == dtype, "kDTypes follows the enum");
  return kDTypes[index];
}

/// A name from a file, fit for a message: in quotes, short, printable.
std::string shown(std::string_view name) {
  constexpr std::size_t kMaxShown = 96;
  std::string text = "'";
  for (const char c : name.substr(0, kMaxShown)) {
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return text + (name.size() > kMaxShown ? "...'" : "'");
}

/// The product of the dimensions, or nothing when it does not fit.
std::optional<std::int64_t> product(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t d : shape) {
    if (d == 0) return 0;
    if (n > kMaxInt64 / d) return std::nullopt;
    n *= d;
  }
  return n;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "*" : std::to_string(shape[i]);
  }
  return text + "]";
}

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  return "bytes " + std::to_string(begin) + " to " + std::to_string(end);
}

/// Walks JSON as it is parsed, so that a hostile header costs no more than its own bytes: depth and
/// repeated names are refused on sight and nothing unknown is stored.
class BoundedSax : public json::json_sax_t {
 public:
  const std::string& problem() const { return problem_; }

  bool start_object(std::size_t) final { return open(true); }
  bool end_object() final { return close(); }
  bool start_array(std::size_t) final { return open(false); }
  bool end_array() final { return close(); }
  bool key(string_t& name) final {
    if (!names_.back().insert(name).second) return fail("the name " + shown(name) + " is repeated");
    path_.back() = name;
    return true;
  }
  bool null() final { return other("null"); }
  bool boolean(bool) final { return other("a boolean"); }
  bool number_integer(number_integer_t) final { return other("a negative number"); }
  bool number_unsigned(number_unsigned_t value) final { return on_number(value); }
  bool number_float(number_float_t, const string_t&) final {
    return other("a fraction or a number past 64 bits");
  }
  bool string(string_t& value) final { return on_string(value); }
  bool binary(binary_t&) final { return other("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) final {
    return fail("it is not valid JSON at byte " + std::to_string(position));
  }

 protected:
  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  /// The names from the outermost object to the value at hand; arrays put in "".
  const std::vector<std::string>& path() const { return path_; }

  virtual bool on_open(bool is_object) = 0;
  virtual bool on_close() { return true; }
  virtual bool on_number(std::uint64_t value) = 0;
  virtual bool on_string(std::string& value) = 0;
  virtual bool other(const char* what) = 0;

 private:
  bool open(bool is_object) {
    if (path_.size() >= kMaxDepth) {
      return fail("it is nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    if (!on_open(is_object)) return false;
    path_.emplace_back();
    names_.emplace_back();
    return true;
  }
  bool close() {
    path_.pop_back();
    names_.pop_back();
    return on_close();
  }

  std::string problem_;
  std::vector<std::string> path_;
  std::vector<std::set<std::string>> names_;
};

/// One entry of a header as it stands in the file.
struct RawTensor {
  std::optional<std::string> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
};

class HeaderSax final : public BoundedSax {
 public:
  std::map<std::string, RawTensor> tensors;
  std::map<std::string, std::string> metadata;

 private:
  bool in_metadata() const { return path()[0] == "__metadata__"; }
  RawTensor& tensor() { return tensors[path()[0]]; }
  bool is_field(const char* name) const {
    return path().size() == 3 && !in_metadata() && path()[1] == name;
  }
  bool wrong(const char* what) {
    return fail((in_metadata() ? "" : "tensor " + shown(path()[0]) + ": ") + "'" + path()[1] +
                "' holds " + what);
  }

  bool on_open(bool is_object) override {
    const std::size_t depth = path().size();
    if (depth == 0) return is_object || fail("it is not a JSON object");
    if (depth == 1) {
      if (!is_object) return fail("tensor " + shown(path()[0]) + " is not described by an object");
      if (!in_metadata()) tensor();
      return true;
    }
    if (depth == 2 && in_metadata()) return wrong("something that is not a string");
    const std::string& field = path()[1];
    if (depth == 2 && (field == "shape" || field == "data_offsets")) {
      if (is_object) return wrong("an object");
      if (field == "shape") tensor().shape.emplace();
      if (field == "data_offsets") tensor().offsets.emplace();
      return true;
    }
    if (depth == 2 && field == "dtype") return wrong("something that is not a string");
    return (!is_field("shape") && !is_field("data_offsets")) || wrong("a nested value");
  }

  bool on_number(std::uint64_t value) override {
    if (is_field("shape")) {
      std::vector<std::int64_t>& shape = *tensor().shape;
      if (shape.size() == kMaxDims) return wrong("more than 16 dimensions");
      if (value > static_cast<std::uint64_t>(kMaxInt64)) return wrong("a number past 63 bits");
      shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (is_field("data_offsets")) {
      std::vector<std::uint64_t>& offsets = *tensor().offsets;
      if (offsets.size() == 2) return wrong("more than two numbers");
      offsets.push_back(value);
      return true;
    }
    return other("a number");
  }

  bool on_string(std::string& value) override {
    if (path().size() == 2 && in_metadata()) {
      metadata[path()[1]] = value;
      return true;
    }
    if (path().size() == 2 && path()[1] == "dtype") {
      tensor().dtype = value;
      return true;
    }
    return other("a string");
  }

  /// Fields that this version does not know are passed over.
  bool other(const char* what) override {
    const std::size_t depth = path().size();
    if (depth == 0) return fail("it is not a JSON object");
    if (depth == 1) return fail("tensor " + shown(path()[0]) + " is not described by an object");
    if (depth == 2 && in_metadata()) return wrong(what);
    const std::string& field = path()[1];
    const bool known = field == "dtype" || field == "shape" || field == "data_offsets";
    return !known || wrong(what);
  }
};

class IndexSax final : public BoundedSax {
 public:
  std::optional<std::map<std::string, std::string>> shard_of;

 private:
  bool in_map() const { return !path().empty() && path()[0] == "weight_map"; }

  bool on_open(bool is_object) override {
    if (path().empty()) return is_object || fail("it is not a JSON object");
    if (!in_map()) return true;
    if (path().size() == 1 && is_object) {
      shard_of.emplace();
      return true;
    }
    return fail("'weight_map' does not map tensor names to file names");
  }
  bool on_number(std::uint64_t) override { return other("a number"); }
  bool on_string(std::string& value) override {
    if (path().size() == 2 && in_map()) {
      (*shard_of)[path()[1]] = value;
      return true;
    }
    return other("a string");
  }
  bool other(const char*) override {
    if (path().empty()) return fail("it is not a JSON object");
    return !in_map() || fail("'weight_map' does not map tensor names to file names");
  }
};

/// The checks that concern one tensor alone.
Result<TensorView> checked_view(const std::string& label, const std::string& name, RawTensor& raw,
                                std::span<const std::byte> data) {
  const std::string where = label + ": tensor " + shown(name);
  const auto damaged = [&](const std::string& what) {
    return Status(Code::kCorrupt, where + what + kDamaged);
  };
  if (!raw.dtype) return damaged(": 'dtype' is missing");
  if (!raw.shape) return damaged(": 'shape' is missing");
  if (!raw.offsets || raw.offsets->size() != 2) {
    return damaged(": 'data_offsets' is not a pair of numbers");
  }
  const auto* const info = std::find_if(kDTypes.begin(), kDTypes.end(),
                                        [&](const DTypeInfo& d) { return d.name == *raw.dtype; });
  if (info == kDTypes.end()) {
    return Status(Code::kUnsupported, where + ": dtype " + shown(*raw.dtype) +
                                          " is not supported; convert it to F32, F16 or BF16");
  }
  const auto [begin, end] = std::pair((*raw.offsets)[0], (*raw.offsets)[1]);
  if (begin > end) return damaged(" ends before it begins: " + range_text(begin, end));
  if (end > data.size()) {
    return damaged(" takes " + range_text(begin, end) + " of a data section of " +
                   std::to_string(data.size()) + " bytes");
  }
  const std::optional<std::int64_t> n_elements = product(*raw.shape);
  const auto width = static_cast<std::int64_t>(info->n_bytes);
  if (!n_elements || *n_elements > kMaxInt64 / width) {
    return damaged(": shape " + shape_text(*raw.shape) + " overflows 63 bits");
  }
  const auto n_bytes = static_cast<std::uint64_t>(*n_elements * width);
  if (n_bytes != end - begin) {
    return damaged(": shape " + shape_text(*raw.shape) + " of " + *raw.dtype + " needs " +
                   std::to_string(n_bytes) + " bytes but has " + std::to_string(end - begin));
  }
  return TensorView{name, info->dtype, std::move(*raw.shape), data.data() + begin,
                    static_cast<std::size_t>(n_bytes)};
}

/// Together the tensors must tile the data section: no byte twice, none left out.
Status check_tiling(const std::string& label, const std::map<std::string, TensorView>& tensors,
                    std::span<const std::byte> data) {
  std::vector<const TensorView*> order;
  order.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorView* a, const TensorView* b) {
    return std::pair(a->data, a->n_bytes) < std::pair(b->data, b->n_bytes);
  });
  const std::byte* cursor = data.data();
  const TensorView* before = nullptr;
  for (const TensorView* tensor : order) {
    if (tensor->data < cursor) {
      return {Code::kCorrupt, label + ": tensors " + shown(before->name) + " and " +
                                  shown(tensor->name) + " overlap" + kDamaged};
    }
    if (tensor->data > cursor) {
      return {Code::kCorrupt, label + ": " + std::to_string(tensor->data - cursor) +
                                  " bytes before tensor " + shown(tensor->name) +
                                  " belong to no tensor" + kDamaged};
    }
    cursor += tensor->n_bytes;
    before = tensor;
  }
  const std::ptrdiff_t n_left = data.data() + data.size() - cursor;
  if (n_left > 0) {
    return {Code::kCorrupt, label + ": the last " + std::to_string(n_left) +
                                " bytes belong to no tensor" + kDamaged};
  }
  return {};
}

/// The view, if its shape is the wanted one.
Result<TensorView> with_shape(const std::string& label, const TensorView* tensor,
                              const std::string& name, const std::vector<std::int64_t>& wanted) {
  if (tensor == nullptr) {
    return Status(Code::kNotFound,
                  label + ": there is no tensor " + shown(name) +
                      "; the file belongs to another kind of model or is incomplete");
  }
  const bool fits =
      std::equal(tensor->shape.begin(), tensor->shape.end(), wanted.begin(), wanted.end(),
                 [](std::int64_t found, std::int64_t want) { return want == -1 || found == want; });
  if (!fits) {
    return Status(Code::kMismatch, label + ": tensor " + shown(name) + " has shape " +
                                       tensor->shape_string() + " where " + shape_text(wanted) +
                                       " is needed; it does not belong to this configuration");
  }
  return *tensor;
}

/// A shard's name may only point into the checkpoint's own folder.
bool plain_file_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name.find("..") == std::string::npos && std::none_of(name.begin(), name.end(), [](char c) {
           return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20;
         });
}

template <class Convert>
void widen(const std::byte* data, std::vector<float>& out, Convert convert) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t half;
    std::memcpy(&half, data + 2 * i, 2);
    out[i] = convert(half);
  }
}

}  // namespace

std::string_view dtype_name(DType dtype) { return info_of(dtype).name; }

std::size_t dtype_bytes(DType dtype) { return info_of(dtype).n_bytes; }

std::int64_t TensorView::n_elements() const {
  return static_cast<std::int64_t>(n_bytes / dtype_bytes(dtype));
}

std::string TensorView::shape_string() const { return shape_text(shape); }

Result<std::vector<float>> to_f32(const TensorView& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.n_elements()));
  switch (tensor.dtype) {
    case DType::kF32:
      if (!out.empty()) std::memcpy(out.data(), tensor.data, tensor.n_bytes);
      return out;
    case DType::kBF16:
      widen(tensor.data, out, bf16_to_f32);
      return out;
    case DType::kF16:
      widen(tensor.data, out, f16_to_f32);
      return out;
    default:
      return Status(Code::kUnsupported, "tensor " + shown(tensor.name) + " is " +
                                            std::string(dtype_name(tensor.dtype)) +
                                            " where F32, F16 or BF16 is needed; convert it");
  }
}

Result<SafeTensors> SafeTensors::open(const std::string& path) {
  SP_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> file, MappedFile::open(path));
  SP_ASSIGN_OR_RETURN(SafeTensors result, parse(file->bytes(), path));
  result.file_ = std::move(file);
  return result;
}

Result<SafeTensors> SafeTensors::parse(std::span<const std::byte> bytes, const std::string& label) {
  if (bytes.size() < 8) {
    return Status(Code::kCorrupt, label + ": " + std::to_string(bytes.size()) +
                                      " bytes are too few for a safetensors file" + kDamaged);
  }
  std::uint64_t n_header = 0;
  std::memcpy(&n_header, bytes.data(), 8);
  if (n_header > kMaxHeaderBytes || n_header > bytes.size() - 8) {
    return Status(Code::kCorrupt, label + ": the header claims " + std::to_string(n_header) +
                                      " bytes; at most " +
                                      std::to_string(std::min(kMaxHeaderBytes, bytes.size() - 8)) +
                                      " are possible" + kDamaged);
  }
  const std::span<const std::byte> data = bytes.subspan(8 + static_cast<std::size_t>(n_header));
  const auto* const text = reinterpret_cast<const char*>(bytes.data()) + 8;
  HeaderSax header;
  if (!json::sax_parse(text, text + n_header, &header)) {
    return Status(Code::kCorrupt,
                  label + ": the header is refused: " + header.problem() + kDamaged);
  }

  SafeTensors result;
  result.label_ = label;
  result.metadata_ = std::move(header.metadata);
  for (auto& [name, raw] : header.tensors) {
    SP_ASSIGN_OR_RETURN(TensorView view, checked_view(label, name, raw, data));
    result.tensors_.emplace(name, std::move(view));
  }
  SP_RETURN_IF_ERROR(check_tiling(label, result.tensors_, data));
  return result;
}

const TensorView* SafeTensors::find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Result<TensorView> SafeTensors::get(const std::string& name,
                                    const std::vector<std::int64_t>& shape) const {
  return with_shape(label_, find(name), name, shape);
}

Result<Checkpoint> Checkpoint::open(const std::string& dir) {
  Checkpoint checkpoint;
  checkpoint.dir_ = dir;
  Result<SafeTensors> single = SafeTensors::open(dir + "/model.safetensors");
  if (single.ok()) {
    checkpoint.tensors_ = single->tensors();
    checkpoint.shards_.push_back(std::move(*single));
    return checkpoint;
  }
  if (single.status().code() != Code::kNotFound) return single.status();

  const std::string index_path = dir + "/model.safetensors.index.json";
  const Result<std::string> text = read_text_file(index_path, kMaxHeaderBytes);
  if (!text.ok()) {
    if (text.status().code() != Code::kNotFound) return text.status();
    return Status(Code::kNotFound,
                  "'" + dir +
                      "' holds neither model.safetensors nor model.safetensors.index.json; " +
                      "give the folder of a downloaded checkpoint");
  }
  IndexSax index;
  if (!json::sax_parse(*text, &index)) {
    return Status(Code::kCorrupt,
                  index_path + ": the index is refused: " + index.problem() + kDamaged);
  }
  if (!index.shard_of) {
    return Status(Code::kCorrupt, index_path + ": 'weight_map' is missing" + kDamaged);
  }
  std::map<std::string, std::size_t> shard_at;
  for (const auto& [name, shard] : *index.shard_of) {
    if (!plain_file_name(shard)) {
      return Status(Code::kCorrupt, index_path + ": tensor " + shown(name) + " is in " +
                                        shown(shard) +
                                        ", which is not a plain file name; do not use " +
                                        "this checkpoint unless you trust its source");
    }
    auto at = shard_at.find(shard);
    if (at == shard_at.end()) {
      Result<SafeTensors> opened = SafeTensors::open(dir + "/" + shard);
      if (!opened.ok() && opened.status().code() == Code::kNotFound) {
        return Status(Code::kNotFound, index_path + ": shard " + shown(shard) +
                                           " is missing from the folder; download it too");
      }
      if (!opened.ok()) return opened.status();
      at = shard_at.emplace(shard, checkpoint.shards_.size()).first;
      checkpoint.shards_.push_back(std::move(*opened));
    }
    const TensorView* tensor = checkpoint.shards_[at->second].find(name);
    if (tensor == nullptr) {
      return Status(Code::kCorrupt, index_path + ": tensor " + shown(name) +
                                        " is listed for shard " + shown(shard) +
                                        " but is not in it; download index and shards again");
    }
    checkpoint.tensors_.emplace(name, *tensor);
  }
  return checkpoint;
}

const TensorView* Checkpoint::find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Result<TensorView> Checkpoint::get(const std::string& name,
                                   const std::vector<std::int64_t>& shape) const {
  const TensorView* tensor = find(name);
  const auto holds = [&](const SafeTensors& shard) {
    const TensorView* found = shard.find(name);
    return tensor != nullptr && found != nullptr && found->data == tensor->data;
  };
  const auto shard = std::find_if(shards_.begin(), shards_.end(), holds);
  return with_shape(shard == shards_.end() ? dir_ : shard->label(), tensor, name, shape);
}

void SafeTensorsWriter::set_metadata(const std::string& key, const std::string& value) {
  metadata_[key] = value;
}

void SafeTensorsWriter::add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
                            std::span<const std::byte> data) {
  const std::optional<std::int64_t> n = product(shape);
  SP_CHECK(n && static_cast<std::size_t>(*n) * dtype_bytes(dtype) == data.size(),
           "data of another size than their shape");
  const bool added =
      entries_.emplace(name, Entry{dtype, std::move(shape), {data.begin(), data.end()}}).second;
  SP_CHECK(added && name != "__metadata__", "tensor names differ from one another");
}

std::vector<const SafeTensorsWriter::Entry*> SafeTensorsWriter::layout(std::string& header) const {
  using Item = std::pair<const std::string, Entry>;
  std::vector<const Item*> items;
  items.reserve(entries_.size());
  for (const Item& item : entries_) items.push_back(&item);
  std::stable_sort(items.begin(), items.end(), [](const Item* a, const Item* b) {
    return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
  });
  json description = json::object();
  if (!metadata_.empty()) description["__metadata__"] = metadata_;
  std::vector<const Entry*> order;
  order.reserve(items.size());
  std::size_t begin = 0;
  for (const Item* item : items) {
    const Entry& entry = item->second;
    const std::size_t end = begin + entry.data.size();
    description[item->first] = {
        {"dtype", dtype_name(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {begin, end}}};
    begin = end;
    order.push_back(&entry);
  }
  // Invalid UTF-8 in a name must not throw: it becomes U+FFFD.
  std::string text = description.dump(-1, ' ', false, json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t n_header = text.size();
  header.resize(8);
  std::memcpy(header.data(), &n_header, 8);
  header += text;
  return order;
}

Status SafeTensorsWriter::write(const std::string& path) const {
  std::string header;
  const std::vector<const Entry*> order = layout(header);
  SP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  SP_RETURN_IF_ERROR(file.write(header));
  for (const Entry* entry : order) SP_RETURN_IF_ERROR(file.write(std::span(entry->data)));
  return file.commit();
}

std::string SafeTensorsWriter::serialize() const {
  std::string text;
  for (const Entry* entry : layout(text)) {
    text.append(reinterpret_cast<const char*>(entry->data.data()), entry->data.size());
  }
  return text;
}

}  // namespace statepack
