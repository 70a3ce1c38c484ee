"""The phrases of the page: one field each, so a phrase that one language lacks is a type error.

Phrases with values in them are templates for `str.format`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Phrase(str):
    """The name of a field of `Words`, as a value inside another phrase."""


@dataclass(frozen=True)
class Words:
    """The phrases of one language; `code` is its tag."""

    code: str
    other_language: str

    # conversations
    conversations: str
    conversation_list: str
    open_list: str
    close_list: str
    new_chat: str
    search: str
    search_conversations: str
    clear_search: str
    nothing_found: str
    found: str
    none_yet: str
    show_all: str
    pinned: str
    today: str
    yesterday: str
    last_7_days: str
    earlier: str
    is_running: str
    more_actions: str
    rename: str
    pin: str
    unpin: str
    export_markdown: str
    export_json: str
    delete: str
    rename_title: str
    new_name: str
    delete_title: str
    delete_text: str
    deleted: str
    does_not_exist: str
    needs_a_name: str
    cancel: str
    save: str
    ok: str
    language: str

    # top bar
    skip: str
    loading: str
    loading_model: str
    loading_long: str
    load_failed: str
    context: str
    context_window: str
    the_model: str
    theme: str
    settings: str
    usage: str
    jump: str

    # writing
    message: str
    write_a_message: str
    attach: str
    files_to_send: str
    attached_files: str
    remove: str
    drop: str
    send: str
    stop: str
    model_is_loading: str
    fineprint: str
    context_used: str
    context_share: str
    context_tokens: str
    tokens: str

    # messages
    welcome: str
    welcome_text: str
    suggestions: str
    suggestion_1: str
    suggestion_2: str
    suggestion_3: str
    suggestion_4: str
    messages: str
    show_earlier: str
    you: str
    answer: str
    copy: str
    copied: str
    press_copy: str
    copy_code: str
    copy_message: str
    copy_answer: str
    edit_message: str
    edit_label: str
    edit_help: str
    save_and_ask: str
    regenerate: str
    versions: str
    previous_version: str
    next_version: str
    reading: str
    thinking: str
    thought: str
    thought_for: str
    stopped: str
    interrupted: str
    cut: str
    empty_answer: str
    finished_said: str
    stopped_said: str
    failed_said: str
    approval_said: str
    speed: str
    first_token: str
    prompt_tokens: str
    cached: str
    answer_tokens: str
    seconds: str
    minutes: str

    # tools
    tools: str
    tools_help: str
    no_tools: str
    tool_calculator: str
    tool_calculator_help: str
    tool_datetime: str
    tool_datetime_help: str
    tool_search_documents: str
    tool_search_documents_help: str
    always_allowed: str
    ask_each_time: str
    arguments: str
    result: str
    tool_written: str
    tool_asking: str
    tool_running: str
    tool_done: str
    tool_failed: str
    tool_denied: str
    tool_skipped: str
    allow_question: str
    allow: str
    allow_always: str
    deny: str

    # settings
    close_settings: str
    model: str
    effort: str
    effort_help: str
    effort_default: str
    effort_none: str
    effort_low: str
    effort_medium: str
    effort_high: str
    label_temperature: str
    help_temperature: str
    label_top_p: str
    help_top_p: str
    label_top_k: str
    help_top_k: str
    label_max_tokens: str
    help_max_tokens: str
    label_seed: str
    help_seed: str
    label_system_prompt: str
    help_system_prompt: str
    random: str
    none: str
    reset: str
    settings_foot: str

    # keyboard
    shortcuts: str
    close: str
    key_send: str
    key_line: str
    key_stop: str
    key_new: str
    key_search: str
    key_next: str
    key_settings: str
    key_help: str

    # usage
    back_to_chat: str
    usage_since: str
    requests: str
    running_now: str
    waiting_now: str
    tokens_read: str
    tokens_written: str
    cache_hits: str
    median_first_token: str
    median_speed: str
    memory_pages: str
    http_requests: str
    endpoint: str
    status: str
    count: str
    no_requests: str
    keys: str
    keys_help: str
    key_name: str
    create_key: str
    key_needs_a_name: str
    key_once: str
    no_keys: str
    created: str
    limits: str
    used_30_days: str
    revoke: str
    revoked: str
    revoke_title: str
    revoke_text: str
    per_minute_requests: str
    per_minute_tokens: str
    per_day_tokens: str
    no_limit: str
    requests_count: str
    ledger: str
    day: str

    # what can go wrong
    apology: str
    not_ready: str
    busy: str
    gone: str
    message_gone: str
    nothing_to_answer: str
    call_gone: str
    store_cannot_open: str
    store_cannot_read: str
    store_cannot_write: str
    model_failed: str
    message_too_long: str
    message_empty: str
    too_many_files: str
    file_empty: str
    file_too_large: str
    file_too_long: str
    file_unreadable: str
    setting_number: str
    setting_number_or_empty: str
    setting_range: str
    setting_whole: str
    setting_unknown: str
    setting_too_long: str
    setting_choice: str

    def say(self, phrase: str, **values: Any) -> str:
        """The phrase with its values; a value that is a `Phrase` is put into words too."""
        words = {name: self.say(value) if isinstance(value, Phrase) else value for name, value in values.items()}
        template: str = getattr(self, phrase)
        return template.format(**words) if words else template
