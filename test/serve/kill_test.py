#!/usr/bin/env python3
"""kill_test.py PROGRAM FOLDER: a server that is killed while it saves a slot leaves a whole file."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request


def start(program, folder):
    process = subprocess.Popen(
        [program, "serve", "--model", "models/statepack-gdn", "--state", "fp32", "--port", "0",
         "--state-pool-slots", "1", "--slot-save-path", folder],
        stderr=subprocess.PIPE, text=True)
    port = None
    for line in process.stderr:
        found = re.search(r"http://127.0.0.1:(\d+)", line)
        port = found[1] if found else port
        if "ready after" in line:
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, f"http://127.0.0.1:{port}"


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def n_tokens_when_free(url):
    while True:
        with urllib.request.urlopen(f"{url}/slots", timeout=60) as answer:
            slot = json.load(answer)[0]
        if not slot["is_processing"] and slot["n_last"] > 0:
            return slot["n_last"]
        time.sleep(0.01)


def main():
    program, folder = sys.argv[1], os.path.join(sys.argv[2], "kill-test")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    draw = random.Random(11)
    allowed = set()  # lengths in tokens of the sequence that was saved and of the one being saved
    n_killed_inside = 0
    n_killed = 0
    # Where in a save a kill falls is chance: eight, and more until one fell inside.
    while n_killed < 8 or (n_killed_inside == 0 and n_killed < 80):
        n_killed += 1
        server, url = start(program, folder)
        try:
            if allowed:
                restored = post(f"{url}/slots/1?action=restore", {"filename": "chat"})
                assert restored["n_restored"] in allowed, (restored, allowed)
                allowed = {restored["n_restored"]}
            prompt = "word " * draw.randrange(200, 900)
            post(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})
            length = n_tokens_when_free(url)
            if not allowed:  # so that there is one to lose
                post(f"{url}/slots/1?action=save", {"filename": "chat"})
            allowed.add(length)
            refused = []

            def save():
                try:
                    while True:
                        post(f"{url}/slots/1?action=save", {"filename": "chat"})
                except urllib.error.HTTPError as error:
                    refused.append(error.read())
                except OSError:
                    pass  # killed

            saver = threading.Thread(target=save)
            saver.start()
            time.sleep(draw.uniform(0.02, 0.08))
            server.kill()
            saver.join()
            assert not refused, refused
        finally:
            server.kill()
            server.wait()
        left = [name for name in os.listdir(folder) if name != "chat"]  # of a write that was cut
        n_killed_inside += len(left) > 0
        for name in left:
            os.remove(os.path.join(folder, name))
    server, url = start(program, folder)
    restored = post(f"{url}/slots/1?action=restore", {"filename": "chat"})
    assert restored["n_restored"] in allowed, (restored, allowed)
    server.kill()
    server.wait()
    assert n_killed_inside > 0, "no kill fell into a save: the test shows nothing"
    print(f"{n_killed} servers killed, {n_killed_inside} of them inside a write; every file was whole")


main()
