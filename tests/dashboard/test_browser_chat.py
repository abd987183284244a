"""The chat and the links of the page, in a real browser with a scripted engine."""

from __future__ import annotations

import json

import pytest
from api_fakes import Script, until
from engine_infos import changed
from page_browser import holds_text, says, show, state, visit

REPLY = "Hello, wörld!"


@pytest.fixture
def page(client, open_page):
    """The page at its chat."""
    # Room for the longest answer of the busload beside the prompt, one token per byte of it.
    client.info = changed(client.info, context_length=1024, pages=64)
    with visit(open_page.page, client):
        show(open_page.page, "chat")
        yield open_page.page
    assert open_page.problems == []


def said(page, role: str) -> list[str]:
    return page.locator(f".talk:not([hidden]) .{role} .text").all_inner_texts()


def send(page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def settled(page, answers: int) -> None:
    """Wait until so many answers are complete."""
    page.wait_for_function(
        """(n) => document.querySelectorAll(".talk:not([hidden]) .assistant .buttons").length === n
            && [...document.querySelectorAll(".talk:not([hidden]) .assistant .buttons")]
                .every((one) => one.children.length)""",
        arg=answers,
    )


def test_five_turns_by_keyboard_then_an_edit_and_another_answer(client, page):
    bodies = []
    page.on("request", lambda sent: bodies.append(sent.post_data) if sent.post_data else None)
    for turn in range(5):
        send(page, f"Question {turn}?")
        settled(page, turn + 1)
    assert said(page, "user") == [f"Question {turn}?" for turn in range(5)]
    assert said(page, "assistant") == [REPLY] * 5
    roles = [message["role"] for message in json.loads(bodies[-1])["messages"]]
    assert roles == ["user", "assistant"] * 4 + ["user"]
    page.locator(".user button").nth(1).click()
    assert page.input_value("#prompt") == "Question 1?"
    send(page, "Something else?")
    settled(page, 2)
    assert said(page, "user") == ["Question 0?", "Something else?"]
    page.locator(".assistant button").filter(has_text="Regenerate").click()
    until(lambda: page.wait_for_timeout(20) or len(client.requests) == 7)
    settled(page, 2)
    page.click("#chat-code summary")
    holds_text(page, "chat-curl", "Something else?")
    compile(page.text_content("#chat-python"), "chat.py", "exec")


def test_five_turns_by_keyboard_alone(client, open_page):
    """From the overview to a chat that is stopped, edited and answered anew; no mouse moves."""
    page, keys = open_page.page, open_page.page.keyboard
    client.info = changed(client.info, context_length=1024, pages=64)
    with visit(page, client):
        keys.press("2")
        page.wait_for_selector("#view-chat.shown")
        for turn in range(4):
            keys.type(f"Question {turn}?")
            keys.press("Enter")
            settled(page, turn + 1)
        client.scripts = [Script(hang=True)]
        keys.type("Question 4?")
        keys.press("Enter")
        until(lambda: page.wait_for_timeout(20) or len(client.open) == 1)
        keys.press("Escape")
        until(lambda: page.wait_for_timeout(20) or not client.open)
        settled(page, 5)
        assert page.locator(".assistant").last.inner_text().startswith("stopped")
        keys.press("ArrowUp")
        keys.type(" Again!")
        keys.press("Enter")
        settled(page, 5)
        assert said(page, "user") == [f"Question {turn}?" for turn in range(4)] + [
            "Question 4? Again!"
        ]
        for _ in range(3):
            keys.press("Shift+Tab")
        assert page.evaluate("document.activeElement.textContent") == "Regenerate"
        keys.press("Enter")
        until(lambda: page.wait_for_timeout(20) or len(client.requests) == 7)
        settled(page, 5)
        assert said(page, "assistant") == [REPLY] * 5
        assert {request.route for request in client.requests} == {"/v1/chat/completions"}
        assert page.evaluate("document.activeElement.id") == "prompt"
        keys.press("Escape")
        keys.press("1")
        page.wait_for_selector("#view-overview.shown")
    assert open_page.problems == []


def test_two_settings_answer_side_by_side_and_a_busload_boards(client, page):
    page.check("#chat-compare")
    page.locator(".talk summary").nth(1).click()
    page.locator(".talk").nth(1).locator("input").first.fill("0.5")
    send(page, "Where to?")
    settled(page, 2)
    assert sorted(request.sampling.temperature for request in client.requests) == [0.5, 1.0]
    page.click("#crowd")
    until(lambda: page.wait_for_timeout(20) or len(client.requests) == 6)
    assert sorted(request.sampling.n for request in client.requests) == [1, 1, 4, 4, 4, 4]


def test_tools_that_are_no_json_are_refused_before_anything_is_sent(client, page):
    page.click(".chat > details summary")
    page.fill("#chat-tools", "[{")
    send(page, "Where to?")
    assert "JSON" in page.text_content("#chat-trouble") and client.requests == []


def test_markdown_becomes_elements_and_never_markup(client, open_page):
    with visit(open_page.page, client):
        html = open_page.page.evaluate(
            """async (text) => {
            const {markdown} = await import("/dashboard/assets/markdown.js");
            const box = document.createElement("div");
            box.append(...markdown(text));
            return box.innerHTML;
        }""",
            "# Stops\n\n1. **Main** street\n2. `x < y`\n\n<b>no</b> [go](https://a.b) [no](javascript:x)\n\n"
            "| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nif a < b:\n    pass",
        )
    assert html == (
        "<h3>Stops</h3><ol><li><strong>Main</strong> street</li><li><code>x &lt; y</code></li></ol>"
        '<p>&lt;b&gt;no&lt;/b&gt; <a href="https://a.b" rel="noopener noreferrer" target="_blank">go</a>'
        " [no](javascript:x)</p>"
        '<table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
        '<pre tabindex="0" data-language="py"><code>if a &lt; b:\n    pass</code></pre>'
    )


def test_a_link_leads_to_a_request_and_to_a_moment(client, open_page):
    page = open_page.page
    with visit(page, client) as url:
        page.wait_for_timeout(1000)
        page.goto("about:blank")
        page.goto(f"{url}/dashboard/#requests/req-b/1")
        page.wait_for_selector("#drawer[open] .verdict")
        says(page, "drawer-name", "req-b (choice 1)")
        assert page.locator("#view-requests.shown").count() == 1
        page.keyboard.press("Escape")
        page.wait_for_selector("#drawer:not([open])", state="attached")
        page.keyboard.press("1")
        page.wait_for_selector("#view-overview.shown")
        page.keyboard.press(" ")
        state(page, "paused")
        page.wait_for_function("() => location.hash.startsWith('#overview/at=')")
        link = page.url
        page.goto("about:blank")
        page.wait_for_timeout(1500)
        page.goto(link)
        state(page, "paused")
        page.wait_for_function(
            "() => document.getElementById('moment').textContent.includes('s ago')"
        )
    assert open_page.problems == []
