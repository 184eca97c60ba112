#include "base/file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "temporary_folder.hpp"

namespace statepack {
namespace {

using testing::HasSubstr;

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST(MappedFile, MapsTheWholeFile) {
  const TemporaryFolder folder;
  const auto file = MappedFile::open(folder.put("a", "hello"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(text_of(**file), "hello");
  EXPECT_EQ((*file)->path(), folder / "a");
  EXPECT_TRUE((*MappedFile::open(folder.put("empty", "")))->bytes().empty());
}

TEST(MappedFile, ErrorsNameThePath) {
  const TemporaryFolder folder;
  const Status missing = MappedFile::open(folder / "none").status();
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_EQ(missing.message(),
            "'" + folder / "none" + "' cannot be opened: No such file or directory");
  const Status under_file = MappedFile::open(folder.put("f", "") + "/x").status();
  EXPECT_EQ(under_file.code(), Code::kNotFound);
  const Status directory = MappedFile::open(folder.path()).status();
  EXPECT_EQ(directory.code(), Code::kIo);
  EXPECT_THAT(directory.message(), HasSubstr(folder.path() + "' is not a regular file"));
  EXPECT_EQ(MappedFile::open("/dev/null").status().code(), Code::kIo);
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::open(folder / "pipe").status().code(), Code::kIo);  // and does not hang
}

TEST(ReadTextFile, ReadsUpToTheLimit) {
  const TemporaryFolder folder;
  const std::string big(200000, 'x');
  EXPECT_EQ(*read_text_file(folder.put("big", big), big.size()), big);
  EXPECT_EQ(*read_text_file(folder.put("empty", ""), 0), "");
  const Status larger = read_text_file(folder / "big", big.size() - 1).status();
  EXPECT_EQ(larger.code(), Code::kCorrupt);
  EXPECT_EQ(larger.message(), "'" + folder / "big" +
                                  "' is larger than 199999 bytes, the most that is read from such "
                                  "a file");
  EXPECT_EQ(read_text_file("/dev/zero", 1000).status().code(), Code::kCorrupt);
  EXPECT_EQ(read_text_file(folder / "none", 10).status().code(), Code::kNotFound);
  EXPECT_EQ(read_text_file(folder.path(), 10).status().code(), Code::kIo);
}

TEST(AtomicFile, AppearsWholeOnCommit) {
  const TemporaryFolder folder;
  folder.put("out", "old");
  auto file = AtomicFile::create(folder / "out");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->write("new ").ok());
  ASSERT_TRUE(file->write("text").ok());
  EXPECT_EQ(*read_text_file(folder / "out", 100), "old");
  ASSERT_TRUE(file->commit().ok());
  EXPECT_EQ(*read_text_file(folder / "out", 100), "new text");
  EXPECT_EQ(folder.n_files(), 1);
  EXPECT_EQ(file->commit().code(), Code::kIo);
  EXPECT_EQ(file->write("more").code(), Code::kIo);
}

TEST(AtomicFile, UnfinishedLeavesNothing) {
  const TemporaryFolder folder;
  {
    auto file = AtomicFile::create(folder / "out");
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->write("half").ok());
    EXPECT_EQ(folder.n_files(), 1);
  }
  EXPECT_EQ(folder.n_files(), 0);
  {
    auto first = AtomicFile::create(folder / "out");
    auto second = AtomicFile::create(folder / "out");  // two writers do not share a temporary
    ASSERT_TRUE(first.ok() && second.ok());
    *first = std::move(*second);
  }
  EXPECT_EQ(folder.n_files(), 0);
}

TEST(AtomicFile, GetsTheUsersPermissions) {
  const TemporaryFolder folder;
  const mode_t mask = ::umask(027);
  auto file = AtomicFile::create(folder / "out");
  ::umask(mask);
  ASSERT_TRUE(file.ok() && file->commit().ok());
  struct stat info {};
  ASSERT_EQ(::stat((folder / "out").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
}

TEST(AtomicFile, FollowsLinksAndRefusesWhatIsNoFile) {
  const TemporaryFolder folder;
  folder.put("real", "old");
  std::filesystem::create_symlink("real", folder / "link");
  auto file = AtomicFile::create(folder / "link");
  ASSERT_TRUE(file.ok() && file->write("new").ok() && file->commit().ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(*read_text_file(folder / "real", 100), "new");

  EXPECT_EQ(AtomicFile::create(folder.path()).status().code(), Code::kIo);
  const Status device = AtomicFile::create("/dev/null").status();
  EXPECT_EQ(device.code(), Code::kIo);
  EXPECT_EQ(device.message(), "'/dev/null' exists and is not a regular file; choose another name");
  const Status no_folder = AtomicFile::create(folder / "none/out").status();
  EXPECT_EQ(no_folder.code(), Code::kNotFound);
  EXPECT_EQ(no_folder.message(),
            "'" + folder / "none/out" + "' cannot be written: No such file or directory");
}

TEST(AtomicFile, FullDiskIsAnErrorAndLeavesNothing) {
  // /dev/full cannot be renamed onto, so the limit on a file's size plays the full disk.
  const TemporaryFolder folder;
  auto file = AtomicFile::create(folder / "out");
  ASSERT_TRUE(file.ok());
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  struct rlimit small = old;
  small.rlim_cur = 4096;
  ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = file->write(std::string(10000, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_EQ(status.message(), "'" + folder / "out" + "' cannot be written: File too large");
  *file = std::move(*AtomicFile::create(folder / "other"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

}  // namespace
}  // namespace statepack
