"""Files are replaced whole; what is no file is written to."""

import os
import threading

import pytest

from sparse_decode._files import replace_file


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_threads_do_not_meet(tmp_path):
    file, faults = tmp_path / "file", []

    def write(name):
        try:
            for _ in range(50):
                replace_file(file, name * 1000)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(set(file.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"")
