"""The cache where threads, processes, file systems and users are not what one would wish."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import LIBRARY, VERSION, Fake, install

from msa_tiles import trust
from msa_tiles.runtime import cache as cache_module
from msa_tiles.runtime import compiler, evidence
from msa_tiles.runtime.cache import Cache, CacheError, Entry, default_root
from msa_tiles.runtime.compiler import CompileError, cache_key
from msa_tiles.runtime.registry import Cell

FORK = multiprocessing.get_context("fork")
STRANGER = 54321


@pytest.fixture
def fake(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(Fake(cell, tmp_path / "cache", tmp_path / "log"), monkeypatch)


@pytest.fixture(autouse=True)
def everything_is_said() -> Iterator[None]:
    cache_module._say_once.cache_clear()
    yield
    cache_module._say_once.cache_clear()


def at_once(count: int, work: Callable[[], object]) -> list[int]:
    """Exit codes of so many forked processes that begin together."""
    barrier = FORK.Barrier(count)

    def run() -> None:
        barrier.wait(30)
        work()

    processes = [FORK.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file somebody else's, who is not root."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


class TestManyAtOnce:
    def test_threads(self, fake: Fake) -> None:
        fake.pause = 0.01
        found: list[Entry] = []
        threads = [threading.Thread(target=lambda: found.append(fake.compile())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len({entry.directory for entry in found}) == 1
        assert fake.count == 1

    def test_threads_where_locks_do_nothing(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        self.test_threads(fake)

    def test_a_thread_waits_for_the_import_of_another(self, cell: Cell, tmp_path: Path) -> None:
        import dataclasses

        file = tmp_path / "slow.py"
        file.write_text("import time\ntime.sleep(0.3)\n\n\ndef scale_rows(width, capacity):\n    return width\n")
        slow = dataclasses.replace(cell, file=file)
        found: list[object] = []
        threads = [threading.Thread(target=lambda: found.append(slow.function(1, 2))) for _ in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert found == [1] * 4

    def test_processes(self, fake: Fake) -> None:
        fake.pause = 0.01
        assert at_once(8, fake.compile) == [0] * 8
        assert fake.count == 1
        assert fake.find() is not None

    @pytest.mark.parametrize("failure", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, None])
    def test_processes_where_locks_fail_or_do_nothing(
        self, failure: int | None, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def flock(_descriptor: int, _operation: int) -> None:
            if failure is not None:
                raise OSError(failure, os.strerror(failure))

        monkeypatch.setattr(fcntl, "flock", flock)
        fake.pause = 0.02
        assert at_once(4, fake.compile) == [0] * 4
        assert 1 <= fake.count <= 4
        assert fake.find() is not None
        assert len(fake.names) == 1
        fake.variant = fake.cell.ci[1]
        fake.compile()
        assert ("has no locks" in caplog.text) == (failure is not None)

    def test_the_first_entry_stays(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever loses a race, and all who loaded from the entry meanwhile, find it where it was."""
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        cache = Cache(fake.root)
        meta = {"function": "f", "kernels": {}}
        entries = []
        for _ in range(2):
            with cache.stage("cell") as staged:
                for name in ("kernel.so", "kernel.cubin"):
                    (staged / name).write_bytes(LIBRARY)
                entries.append(cache.publish("cell", "key", VERSION, staged, meta))
                if len(entries) == 1:
                    inode = entries[0].directory.stat().st_ino
        assert entries[0].directory == entries[1].directory
        assert entries[1].directory.stat().st_ino == inode
        assert [path.name for path in (fake.root / "cell").iterdir()] == [f"key-{VERSION}"]

    def test_a_reader_sees_a_whole_entry_or_none(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also while others who know of no locks publish the same again and again."""
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        fake.compile()
        monkeypatch.setattr(Cache, "load", lambda *_, **__: None)
        writers = [FORK.Process(target=lambda: [fake.compile() for _ in range(20)]) for _ in range(3)]
        monkeypatch.undo()
        install(fake, monkeypatch)
        for writer in writers:
            writer.start()
        reads = 0
        while any(writer.is_alive() for writer in writers):
            assert fake.find() is not None
            reads += 1
        assert [writer.exitcode for writer in writers] == [0] * 3 and reads

    def test_a_child_of_a_fork_waits_for_no_thread_of_its_parent(self, fake: Fake) -> None:
        """Nor does anybody wait for the child, which has the parent's locked file open."""
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with Cache(fake.root).lock(fake.cell.id, "key"), compiler._state:
                inside.set()
                leave.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        assert inside.wait(30)
        done, end = FORK.Event(), FORK.Event()

        def child() -> None:
            with Cache(fake.root).lock(fake.cell.id, "another key"), compiler._state:
                done.set()
            end.wait(30)

        process = FORK.Process(target=child)
        process.start()
        try:
            assert done.wait(10)
            leave.set()
            holder.join()
            start = time.monotonic()
            with Cache(fake.root).lock(fake.cell.id, "key"):
                assert time.monotonic() - start < 10
        finally:
            leave.set()
            end.set()
            process.join(10)


class TestCrashes:
    def test_a_process_killed_at_any_moment_leaves_a_cache_that_works(self, fake: Fake) -> None:
        fake.pause = 0.004
        draw = random.Random(int(os.environ["MSA_TILES_SEED"]))
        killed = 0
        for _ in range(25):
            process = FORK.Process(target=fake.compile)
            process.start()
            process.join(draw.uniform(0.0, 0.06))
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            assert fake.find() is None or fake.find().library.read_bytes() == LIBRARY
            shutil.rmtree(fake.root / fake.cell.id / f"{self._key(fake)}-{VERSION}", ignore_errors=True)
        assert killed > 3
        fake.pause = 0
        assert fake.compile().library.read_bytes() == LIBRARY
        self._age(fake)
        fake.variant = fake.cell.ci[1]
        fake.compile()
        assert not [name for name in fake.names if name.startswith(".stage-")]

    def test_a_compilation_that_goes_on_is_left_alone(self, fake: Fake) -> None:
        with Cache(fake.root).stage(fake.cell.id) as staged:
            fake.compile()
            assert staged.is_dir()
            self._age(fake)
            fake.variant = fake.cell.ci[1]
            fake.compile()
            assert not staged.exists()

    @staticmethod
    def _age(fake: Fake) -> None:
        long_ago = time.time() - 2 * cache_module._ABANDONED
        for path in (fake.root / fake.cell.id).glob(".stage-*"):
            os.utime(path, (long_ago, long_ago))

    @staticmethod
    def _key(fake: Fake) -> str:
        return cache_key(fake.cell, fake.variant, "sm_90a")

    def test_a_failure_leaves_nothing(self, fake: Fake) -> None:
        fake.failure = CompileError("no")
        with pytest.raises(CompileError, match=r"^no$"):
            fake.compile()
        assert fake.names == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_a_sentence(self, number: int, fake: Fake) -> None:
        fake.failure = OSError(number, os.strerror(number))
        with pytest.raises(CacheError, match=r"is on a full disk .*; set MSA_TILES_CACHE_DIR to a directory"):
            fake.compile()
        assert fake.names == []

    def test_a_compiler_that_fails_on_a_full_disk(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        """nvcc and linkers write what they like."""
        fake.failure = CompileError("ld: final link failed")
        monkeypatch.setattr(compiler, "_LEAST_ROOM", 1 << 62)
        with pytest.raises(CompileError, match=r"final link failed; the disk of .* is full"):
            fake.compile()


class TestWhoseMachine:
    def test_machines_and_their_libraries_have_keys_of_their_own(
        self, fake: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def key() -> str:
            return cache_key(fake.cell, fake.variant, "sm_90a")

        keys = [key()]
        monkeypatch.setattr(platform, "machine", lambda: "another")
        keys.append(key())
        monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
        keys.append(key())
        monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.3"))
        keys.append(key())
        assert len(set(keys)) == 4

    @pytest.mark.parametrize(
        "library",
        [
            LIBRARY[:18] + (0x2A).to_bytes(2, "little") + LIBRARY[20:],
            LIBRARY[:4] + b"\x01" + LIBRARY[5:],
            b"#!/bin/sh\nexit 0\n",
            b"",
        ],
        ids=["another processor", "32 bits", "no library", "empty"],
    )
    def test_a_foreign_library_is_a_miss_and_is_replaced(self, library: bytes, fake: Fake) -> None:
        """Though the hash is right."""
        entry = fake.compile()
        entry.library.write_bytes(library)
        rewrite(entry, lambda meta: meta["sha256"].update({"kernel.so": cache_module._sha256(library)}))
        assert fake.find() is None
        assert fake.compile().library.read_bytes() == LIBRARY
        assert fake.count == 2 and len(fake.names) == 1

    def test_a_truncated_library_is_a_miss(self, fake: Fake) -> None:
        entry = fake.compile()
        entry.library.write_bytes(LIBRARY[:-1])
        assert fake.find() is None

    @pytest.mark.parametrize("what", ["file", "link", "directory"])
    def test_what_stands_in_an_entrys_place_is_moved_away(self, what: str, fake: Fake, tmp_path: Path) -> None:
        place = fake.compile().directory
        shutil.rmtree(place)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
        if what == "file":
            place.write_text("")
        elif what == "link":
            place.symlink_to(elsewhere)
        else:
            (place / "deep").mkdir(parents=True)
        assert fake.find() is None
        assert fake.compile().directory == place
        assert fake.names == [place.name] and place.is_dir() and not place.is_symlink()
        assert (elsewhere / "mine").read_text() == "mine"


def rewrite(entry: Entry, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the meta of an entry. A change may return the text that is to stand there."""
    path = entry.directory / "meta.json"
    meta = json.loads(path.read_text())
    text = change(meta)
    path.write_text(text if isinstance(text, str) else json.dumps(meta))


META: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another variant": lambda meta: meta["variant"].update(width=128),
    "another digest": lambda meta: meta.update(digest="f" * 16),
    "another architecture": lambda meta: meta.update(arch="sm_100a"),
    "another cell": lambda meta: meta.update(cell="combine.tilelang.sm90.bf16"),
    "another key": lambda meta: meta.update(key="0" * 24),
    "another format": lambda meta: meta.update(format=1),
    "no function": lambda meta: meta.pop("function"),
    "a function that is no name": lambda meta: meta.update(function="f; import os"),
    "no kernels": lambda meta: meta.pop("kernels"),
    "no hashes": lambda meta: meta.pop("sha256"),
    "hashes of some": lambda meta: meta["sha256"].pop("kernel.so"),
    "hashes of other files": lambda meta: meta["sha256"].update({"../../../etc/passwd": "0"}),
    "hashes that are none": lambda meta: meta.update(sha256=[["kernel.so"]]),
    "a list": lambda meta: "[]",
    "no JSON": lambda meta: "{",
    "nested beyond measure": lambda meta: "[" * 200_000 + "]" * 200_000,
    "too long": lambda meta: json.dumps({**meta, "more": " " * (1 << 20)}),
    "a number beyond measure": lambda meta: '{"format": ' + "9" * 100_000 + "}",
    "bytes that are no text": lambda meta: "\x00",
}


class TestTrust:
    @pytest.mark.parametrize("change", META.values(), ids=META)
    def test_a_meta_that_is_not_the_entrys_is_a_miss(self, change: Callable, fake: Fake) -> None:
        rewrite(fake.compile(), change)
        assert fake.find() is None
        assert fake.compile().meta["function"] == "scale_rows_kernel"

    def test_an_entry_under_the_key_of_another_is_a_miss(self, fake: Fake) -> None:
        mine = fake.compile().directory
        fake.variant = fake.cell.ci[1]
        other = fake.compile().directory
        shutil.rmtree(other)
        shutil.copytree(mine, other)
        assert fake.find() is None

    @pytest.mark.parametrize("part", ["", "kernel.so", "kernel.cubin", "meta.json"])
    @pytest.mark.parametrize("how", ["writable", "another's", "link"])
    def test_what_others_could_have_written_is_a_miss(
        self,
        part: str,
        how: str,
        fake: Fake,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = fake.compile().directory / part
        if how == "writable":
            path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)
        elif how == "another's":
            give_away(path, monkeypatch)
        else:
            path.rename(tmp_path / "moved")
            path.symlink_to(tmp_path / "moved")
        assert fake.find() is None
        if how == "link" and part:  # O_NOFOLLOW says it, which needs no explanation
            return
        assert {"writable": "written to by others", "another's": "belongs to user", "link": "symbolic link"}[
            how
        ] in caplog.text

    @pytest.mark.parametrize("part", [".", "scale_rows.tilelang.sm90.bf16"])
    def test_a_directory_that_others_may_write_to_is_not_used(
        self, part: str, fake: Fake, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake.compile()
        (fake.root / part).chmod(0o777)
        assert fake.find() is None
        assert "may be written to by others (mode 777)" in caplog.text
        with pytest.raises(CacheError, match=r"is not trusted: .* may be written to by others \(mode 777\)"):
            fake.compile()
        assert fake.count == 1

    def test_users_who_are_named_are_trusted(
        self, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        entry = fake.compile()
        owner = entry.directory.stat().st_uid
        give_away(entry.library, monkeypatch)
        stranger = entry.library.stat().st_uid
        assert (fake.find() is None) == (stranger != 0)
        assert f"{trust.VARIABLE}={stranger} trusts that user" in caplog.text or stranger == 0
        monkeypatch.setenv(trust.VARIABLE, f"{owner}, {stranger}")
        assert fake.find() is not None
        monkeypatch.setenv(trust.VARIABLE, "me")
        with pytest.raises(ValueError, match="MSA_TILES_CACHE_TRUST is 'me', wanted numbers of users"):
            fake.find()

    def test_a_root_reached_through_a_link_serves(self, fake: Fake, tmp_path: Path) -> None:
        """Home directories lie on other disks."""
        fake.compile()
        (tmp_path / "link").symlink_to(fake.root)
        fake.root = tmp_path / "link"
        assert fake.find() is not None

    @pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o755), (0o002, 0o755), (0o022, 0o755), (0o077, 0o700)])
    def test_others_may_read_entries_and_never_write_them(self, umask: int, mode: int, fake: Fake) -> None:
        before = os.umask(umask)
        try:
            entry = fake.compile()
            entry.write_audit({"format": 1})
        finally:
            os.umask(before)
        assert fake.find() is not None and entry.read_audit() == {"format": 1}
        for directory in (fake.root, entry.directory.parent, entry.directory):
            assert stat.S_IMODE(directory.stat().st_mode) == mode, directory
        for file in entry.directory.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == mode & 0o644, file

    def test_whoever_makes_the_root_makes_it_for_this_user_alone(self, fake: Fake) -> None:
        """Marks of simulated cells and journals lie there, too."""
        before = os.umask(0o002)
        try:
            evidence.mark_simulated(fake.cell, fake.root)
        finally:
            os.umask(before)
        assert fake.compile() and fake.find() is not None

    def test_a_pipe_in_the_place_of_a_file_does_not_block(self, fake: Fake) -> None:
        library = fake.compile().library
        library.unlink()
        os.mkfifo(library)
        assert fake.find() is None


class TestPlaces:
    @pytest.fixture
    def read_only(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
        """A prebuilt cache on a read-only file system; root may write to everything else."""
        fake.compile().write_audit({"format": 1})
        root, opened, made = str(fake.root), os.open, os.mkdir

        def refuse(path: object) -> None:
            if str(path).startswith(root):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        def read_only_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse(path)
            return opened(path, flags, *rest, **named)

        def read_only_mkdir(path: Any, *rest: Any, **named: Any) -> None:
            if not os.path.isdir(path):
                refuse(path)
            made(path, *rest, **named)

        writable = os.access
        monkeypatch.setattr(os, "open", read_only_open)
        monkeypatch.setattr(os, "mkdir", read_only_mkdir)
        monkeypatch.setattr(
            os,
            "access",
            lambda path, mode: not (str(path).startswith(root) and mode & os.W_OK) and writable(path, mode),
        )
        return fake

    def test_a_read_only_cache_serves(self, read_only: Fake) -> None:
        entry = read_only.compile()
        assert read_only.count == 1
        entry.write_audit({"format": 2})
        assert entry.read_audit() == {"format": 1}

    def test_what_a_read_only_cache_lacks_is_a_sentence(self, read_only: Fake) -> None:
        read_only.variant = read_only.cell.ci[1]
        with pytest.raises(CacheError, match=r"cannot be written \(.*\); set MSA_TILES_CACHE_DIR to a dir"):
            read_only.compile()
        assert read_only.count == 1

    def test_a_file_system_without_execution_is_noticed_before_compiling(
        self, fake: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Status:
            f_flag = os.ST_NOEXEC

        monkeypatch.setattr(os, "statvfs", lambda _path: Status)
        with pytest.raises(CacheError, match="mounted noexec, from which no code can be loaded"):
            fake.compile()
        assert fake.count == 0

    def test_a_root_that_is_a_file(self, fake: Fake) -> None:
        fake.root.write_text("")
        assert fake.find() is None
        with pytest.raises(CacheError, match=r"cannot be written \(File exists\)"):
            fake.compile()

    @pytest.mark.parametrize("home", [None, "/", "/nonexistent/home", "/dev/null", "", "relative"])
    def test_without_a_home_there_is_a_cache_of_this_user(
        self, home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        import pwd
        import tempfile

        def unknown(_uid: int) -> object:
            raise KeyError("uid not found")

        monkeypatch.delenv("MSA_TILES_CACHE_DIR", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        # Root may write to `/`, make directories there and leave them behind; others may not.
        monkeypatch.setattr(os, "access", lambda path, _mode: str(path) not in ("/", "/nonexistent"))
        if home is None:
            monkeypatch.delenv("HOME", raising=False)
        else:
            monkeypatch.setenv("HOME", home)
        assert default_root() == tmp_path / f"msa_tiles-{os.geteuid()}"
        assert "MSA_TILES_CACHE_DIR names another directory" in caplog.text

    def test_a_read_only_home_with_a_cache_serves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MSA_TILES_CACHE_DIR", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".cache/msa_tiles").mkdir(parents=True)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert default_root() == tmp_path / ".cache/msa_tiles"

    def test_a_directory_that_somebody_made_before_is_not_used(
        self, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As anybody can do in /tmp."""
        fake.root.mkdir()
        give_away(fake.root, monkeypatch)
        if fake.root.stat().st_uid == 0:
            pytest.skip("what belongs to root is trusted")
        with pytest.raises(CacheError, match=r"is not trusted: .* belongs to user"):
            fake.compile()

    def test_the_variable_is_a_path(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for value, root in (("~/x", tmp_path / "x"), ("rel/x", tmp_path / "rel/x"), ("~", tmp_path)):
            monkeypatch.setenv("MSA_TILES_CACHE_DIR", value)
            assert default_root() == root
        monkeypatch.setenv("MSA_TILES_CACHE_DIR", "")
        assert default_root() == tmp_path / ".cache/msa_tiles", "as the README says of all variables"
        monkeypatch.setenv("MSA_TILES_CACHE_DIR", "~nobody_at_all/x")
        with pytest.raises(CacheError, match="'~nobody_at_all/x', and there is no such home directory"):
            default_root()


def test_waiting_is_said(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ready, leave = FORK.Event(), FORK.Event()

    def hold() -> None:
        with Cache(fake.root).lock(fake.cell.id, "key"):
            ready.set()
            leave.wait(30)

    process = FORK.Process(target=hold)
    process.start()
    assert ready.wait(30)
    threading.Timer(0.3, leave.set).start()
    with Cache(fake.root).lock(fake.cell.id, "key"):
        pass
    process.join()
    assert "another process compiles this kernel; waiting for it" in caplog.text


def test_the_fake_library_is_one_of_this_machine() -> None:
    assert cache_module._is_of_this_machine(LIBRARY)
    assert platform.machine() in cache_module._MACHINES or sys.platform != "linux"
