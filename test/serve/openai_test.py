"""The server as OpenAI's own Python client sees it.

    python3 test/serve/openai_test.py PROGRAM     # needs the packages of openai-requirements.txt
"""

import re
import subprocess
import sys
import unittest

import openai

PROGRAM = sys.argv.pop(1)
MODEL = "statepack-gdn"
QUESTION = [{"role": "user", "content": "Compute 12 + 30."}]


class Server:
    def __init__(self, *options):
        self.process = subprocess.Popen(
            [PROGRAM, "serve", "--model", f"models/{MODEL}", "--state", "int8", "--port", "0",
             "--state-pool-slots", "8", "--max-model-len", "2048", *options],
            stderr=subprocess.PIPE, text=True)
        self.url = ""
        for line in self.process.stderr:
            found = re.search(r"(http://\S+) answers", line)
            if found:
                self.url = found.group(1)
            if " ready after " in line:
                break
        if not self.url or self.process.poll() is not None:
            raise RuntimeError("the server did not start")

    def client(self, key="secret"):
        return openai.OpenAI(base_url=self.url + "v1", api_key=key, max_retries=0, timeout=60)

    def stop(self):
        self.process.terminate()
        code = self.process.wait(60)
        self.process.stderr.close()
        return code


class OpenAITest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--api-key", "secret", "--max-queue", "64")
        cls.client = cls.server.client()

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        assert code == 0, f"the server ended with {code}"

    def chat(self, **fields):
        return self.client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "max_completion_tokens": 32, **fields})

    def test_lists_its_model(self):
        self.assertEqual([m.id for m in self.client.models.list()], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).object, "model")

    def test_answers_a_chat(self):
        answer = self.chat()
        choice = answer.choices[0]
        self.assertEqual(choice.message.role, "assistant")
        self.assertTrue(choice.message.content)
        self.assertIn(choice.finish_reason, ("stop", "length"))
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreaterEqual(usage.prompt_tokens_details.cached_tokens, 0)

    def test_streams_the_same_text(self):
        whole = self.chat().choices[0].message.content
        text, finish, usage = "", None, None
        for chunk in self.chat(stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertEqual(text, whole)
        self.assertIn(finish, ("stop", "length"))
        self.assertGreater(usage.completion_tokens, 0)

    def test_gives_log_probabilities(self):
        content = self.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        self.assertEqual(len(content[0].top_logprobs), 3)
        self.assertLessEqual(content[0].logprob, 0)
        self.assertEqual(bytes(content[0].bytes).decode(), content[0].token)

    def test_draws_n_answers_from_a_seed(self):
        fields = {"n": 3, "temperature": 1.5, "seed": 11}
        first = [c.message.content for c in self.chat(**fields).choices]
        self.assertEqual(len(first), 3)
        self.assertEqual(first, [c.message.content for c in self.chat(**fields).choices])

    def test_completes_several_prompts(self):
        answer = self.client.completions.create(
            model=MODEL, prompt=["Once upon a time", "The list is"], max_tokens=8, temperature=0,
            logprobs=1, extra_body={"ignore_eos": True})
        self.assertEqual([c.index for c in answer.choices], [0, 1])
        self.assertEqual(len(answer.choices[0].logprobs.tokens), 8)
        streamed = ["", ""]
        for chunk in self.client.completions.create(
                model=MODEL, prompt=["Once upon a time", "The list is"], max_tokens=8,
                temperature=0, stream=True, extra_body={"ignore_eos": True}):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        self.assertEqual(streamed, [c.text for c in answer.choices])

    def test_stops_at_a_text(self):
        text = self.chat(temperature=0).choices[0].message.content
        stop = text[1:3]
        answer = self.chat(temperature=0, stop=[stop])
        self.assertEqual(answer.choices[0].message.content, text[:text.find(stop)])
        self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_raises_the_errors_that_the_client_knows(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        self.assertEqual(caught.exception.type, "BadRequestError")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(messages=[{"role": "user", "content": "word " * 3000}])
        self.assertIn("2048", caught.exception.message)
        with self.assertRaises(openai.NotFoundError):
            self.chat(model="gpt-4")
        with self.assertRaises(openai.AuthenticationError) as caught:
            self.server.client("wrong").models.list()
        self.assertEqual(caught.exception.type, "authentication_error")
        with self.assertRaises(openai.InternalServerError) as caught:
            self.chat(response_format={"type": "json_object"})
        self.assertEqual(caught.exception.status_code, 501)

    def test_raises_an_error_inside_a_stream(self):
        server = Server("--request-timeout", "0.3")
        try:
            stream = server.client().completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=2000, stream=True,
                extra_body={"ignore_eos": True})
            with self.assertRaises(openai.APIError) as caught:
                for _ in stream:
                    pass
            self.assertIn("took longer than 300 ms", caught.exception.message)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_carries_a_chat_on(self):
        first = self.chat(temperature=0)
        messages = QUESTION + [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And 5 more?"}]
        second = self.chat(messages=messages, temperature=0)
        self.assertGreaterEqual(second.usage.prompt_tokens_details.cached_tokens,
                                first.usage.prompt_tokens)


if __name__ == "__main__":
    unittest.main()
