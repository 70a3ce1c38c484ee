"""Thirty small jobs of several steps each: does the model get them done, and how often does it try again?

    python bench/agent_tasks.py --model qwen2.5-coder-0.5b

Ten with a calculator, ten in a folder of files, ten in a shop whose orders are in SQLite. A job is a script: its user
says one step after the other, each of which takes a call of a tool at least (`tool_choice` "required"), and then asks
for the answer in a sentence. Of each is told whether it was `completed`: the answer holds what was asked for, or the
shop's tables are as they should be; whether what was asked for was `found`, in the results of the tools; how many calls
there were, how many came to an error, and how many were `retries`, calls of a tool whose last call had failed.
All greedily, through `openk3.agents`. Accuracy is no matter of time: the machine need not be idle.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from results import add_options, keep, positive, result_head, run

from openk3 import agents
from openk3.engine import EngineConfig
from openk3.llm import LLM, load

SYSTEM = "You are an assistant with tools. Call them to do what the user asks."
LAST = "So what is the answer? Say it in one short sentence."

FILES = {
    "notes/meeting-monday.txt": "Monday meeting. Anna leads the Falcon project. Next review: 14 March. Room B12.",
    "notes/meeting-friday.txt": "Friday meeting. Bruno leads the Heron project. Next review: 2 April. Room A3.",
    "contracts/lease-oslo.txt": "Lease, Oslo office. Rent: 4200 euros a month. Landlord: Nordhus AS. Ends in 2027.",
    "contracts/lease-porto.txt": "Lease, Porto office. Rent: 1900 euros a month. Landlord: Ribeira Lda. Ends in 2026.",
    "budget/falcon.txt": "Falcon budget: hardware 12000, travel 3500, licences 900.",
    "budget/heron.txt": "Heron budget: hardware 8000, travel 1200, licences 450.",
    "people/anna.txt": "Anna Berg. Phone 5551. Office Oslo. Likes tea.",
    "people/bruno.txt": "Bruno Costa. Phone 5572. Office Porto. Likes coffee.",
    "manuals/printer.txt": "Printer manual. If error E42 shows, change the toner. If E17 shows, remove the paper.",
    "manuals/router.txt": "Router manual. To reset it, hold the button for 12 seconds.",
}


class Shop:
    """A small shop in SQLite, and the tools that work in it."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.executescript(
            """
            create table products (id integer primary key, name text, price real, stock integer);
            create table customers (id integer primary key, name text, city text);
            create table orders (id integer primary key, customer_id integer, product_id integer, quantity integer,
                                 status text default 'open');
            insert into products values (1, 'red mug', 8.5, 20), (2, 'blue mug', 9.0, 0), (3, 'tea pot', 24.0, 5),
                                        (4, 'coffee grinder', 60.0, 3), (5, 'spoon', 1.5, 200);
            insert into customers values (1, 'Anna', 'Oslo'), (2, 'Bruno', 'Porto'), (3, 'Chen', 'Xiamen');
            insert into orders values (1, 1, 3, 1, 'open'), (2, 2, 1, 4, 'open'), (3, 2, 5, 10, 'sent');
            """
        )

    @property
    def tools(self) -> list[Callable[..., Any]]:
        return [self.find_product, self.find_customer, self.list_orders, self.place_order, self.cancel_order]

    def find_product(self, name: str) -> list[dict[str, Any]]:
        """Find products by a part of their name: id, name, price and stock of each."""
        return self._rows("select * from products where name like ?", f"%{name}%")

    def find_customer(self, name: str) -> list[dict[str, Any]]:
        """Find customers by their name: id, name and city of each."""
        return self._rows("select * from customers where name like ?", f"%{name}%")

    def list_orders(self, customer_id: int) -> list[dict[str, Any]]:
        """The orders of a customer, given the customer's id."""
        if not self._rows("select id from customers where id = ?", customer_id):
            raise ValueError(f"there is no customer {customer_id}; find_customer gives the ids")
        return self._rows("select * from orders where customer_id = ?", customer_id)

    def place_order(self, customer_id: int, product_id: int, quantity: int) -> dict[str, Any]:
        """Place an order, given the ids of the customer and the product."""
        if not self._rows("select id from customers where id = ?", customer_id):
            raise ValueError(f"there is no customer {customer_id}; find_customer gives the ids")
        stock = self._rows("select stock from products where id = ?", product_id)
        if not stock:
            raise ValueError(f"there is no product {product_id}; find_product gives the ids")
        if not 0 < quantity <= stock[0]["stock"]:
            raise ValueError(f"only {stock[0]['stock']} of this product are there")
        order = self.db.execute(
            "insert into orders (customer_id, product_id, quantity) values (?, ?, ?)",
            (customer_id, product_id, quantity),
        ).lastrowid
        self.db.execute("update products set stock = stock - ? where id = ?", (quantity, product_id))
        return {"order_id": order, "status": "open"}

    def cancel_order(self, order_id: int) -> dict[str, Any]:
        """Cancel an open order, given its id."""
        found = self._rows("select status from orders where id = ?", order_id)
        if not found or found[0]["status"] != "open":
            raise ValueError(f"there is no open order {order_id}; list_orders gives the ids")
        self.db.execute("update orders set status = 'cancelled' where id = ?", (order_id,))
        return {"order_id": order_id, "status": "cancelled"}

    def orders(self) -> set[tuple[int, int, int]]:
        """Customer, product and quantity of the orders that were placed, and are not cancelled."""
        query = "select customer_id, product_id, quantity from orders where id > 3 and status = 'open'"
        return set(self.db.execute(query).fetchall())

    def cancelled(self) -> set[int]:
        return {order for (order,) in self.db.execute("select id from orders where status = 'cancelled'")}

    def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        found = self.db.execute(query, values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def list_files(folder: str) -> list[str]:
    """The names of the files in a folder; "" for all of them."""
    return [path for path in FILES if path.startswith(folder.strip("/."))]


def search_files(text: str) -> list[str]:
    """The names of the files that hold a text, which may be one word."""
    return [path for path, content in FILES.items() if text.lower() in content.lower()]


def read_file(path: str) -> str:
    """What is in a file, given its whole name."""
    if path not in FILES:
        raise ValueError(f"there is no file {path!r}; list_files and search_files give the names")
    return FILES[path]


@dataclass(frozen=True)
class Task:
    """A job.

    Attributes:
        steps: what the user says, one after the other.
        says: numbers and words that the answer has to hold.
        orders, cancelled: what has to be in the shop afterwards, and nothing else.
    """

    kind: str
    steps: tuple[str, ...]
    says: tuple[str, ...] = ()
    orders: frozenset[tuple[int, int, int]] = frozenset()
    cancelled: frozenset[int] = frozenset()


def _sums(*tasks: tuple[str, str, str]) -> list[Task]:
    return [Task("calculator", (first, then), (answer,)) for first, then, answer in tasks]


def _finds(*tasks: tuple[str, str, str]) -> list[Task]:
    return [Task("files", (first, then), (answer,)) for first, then, answer in tasks]


def _orders(*tasks: tuple[tuple[str, ...], tuple[int, int, int]]) -> list[Task]:
    return [Task("shop", steps, orders=frozenset({order})) for steps, order in tasks]


def _cancels(*tasks: tuple[tuple[str, ...], int]) -> list[Task]:
    return [Task("shop", steps, cancelled=frozenset({order})) for steps, order in tasks]


TASKS = [
    *_sums(
        ("Multiply 17 by 23.", "Add 119 to that.", "510"),
        ("How much is 12.5 percent of 864?", "Subtract 8 from that.", "100"),
        ("Compute 2 to the power of 15.", "Divide that by 64.", "512"),
        ("A rectangle is 37 by 48. What is its area?", "How much is a third of that?", "592"),
        ("Add 1234 and 4321.", "Multiply the sum by 3.", "16665"),
        ("Compute the square root of 7225.", "Multiply that by 11.", "935"),
        ("7 boxes hold 144 pens each. How many pens are that?", "59 of them are sold. How many are left?", "949"),
        ("How many minutes are 5 hours and 20 minutes?", "How many seconds are that?", "19200"),
        ("A price of 250 is raised by 20 percent. What is it now?", "It is lowered by 10 percent. And now?", "270"),
        ("Compute 99 * 99.", "Subtract 98 * 100 from that.", "1"),
    ),
    *_finds(
        ("Which files hold the word Falcon?", "Read the notes of the meeting. Which room is it in?", "B12"),
        ("Which files hold the word Heron?", "Read the notes of the meeting. Who leads the project?", "Bruno"),
        ("List the files in the folder contracts.", "Read the lease of Oslo. How much is the rent?", "4200"),
        ("List the files in the folder contracts.", "Read the lease of Porto. Who is the landlord?", "Ribeira"),
        ("List the files in the folder budget.", "Read the budget of Falcon. How much is for travel?", "3500"),
        ("Search the files for E42.", "Read that file. What must be done for E42?", "toner"),
        ("Search the files for router.", "Read that file. How long must the button be held?", "12"),
        ("Search the files for Heron.", "Read the notes of the meeting. When is the next review?", "2 April"),
        ("List the files in the folder people.", "Read the file about Anna. What does she like to drink?", "tea"),
        ("Search the files for Oslo.", "Read the lease. In which year does it end?", "2027"),
    ),
    *_orders(
        (("Find the customer Anna.", "Find the product red mug.", "Place an order for Anna: 2 red mugs."), (1, 1, 2)),
        (
            ("Find the customer Chen.", "Find the coffee grinder.", "Place an order for Chen: 1 coffee grinder."),
            (3, 4, 1),
        ),
        (("Find the customer Bruno.", "Find the product spoon.", "Place an order for Bruno: 12 spoons."), (2, 5, 12)),
        (("Find the tea pot.", "Find the customer Chen.", "Place an order for Chen: 3 tea pots."), (3, 3, 3)),
        (("Find the product mug.", "Find the customer Bruno.", "Order 1 of the red mugs for Bruno."), (2, 1, 1)),
        (("Find the customer Chen.", "Find the product spoon.", "Place an order for Chen: 6 spoons."), (3, 5, 6)),
    ),
    *_cancels(
        (("Find the customer Anna.", "List the orders of Anna.", "Cancel the open order."), 1),
        (("Find the customer Bruno.", "List the orders of Bruno.", "Cancel the order that is open."), 2),
    ),
    Task("shop", ("Find the customer Chen.",), ("Xiamen",)),
    Task("shop", ("Find the product tea pot.",), ("24",)),
]


def holds(text: str, words: Sequence[str]) -> bool:
    text = text.replace(",", "")
    return all(re.search(rf"(?<![\w.])({re.escape(word)})(?!\w|\.\d)", text, re.IGNORECASE) for word in words)


def do(llm: LLM, task: Task, rounds: int) -> dict[str, Any]:
    shop = Shop()
    tools: dict[str, Sequence[Any]] = {
        "calculator": ["calculator"],
        "files": [list_files, search_files, read_file],
        "shop": shop.tools,
    }
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    options: dict[str, Any] = {"tools": tools[task.kind], "temperature": 0, "max_tokens": 300, "max_rounds": rounds}
    ends = []
    for choice, said in [*(("required", step) for step in task.steps), ("none", LAST)]:
        messages.append({"role": "user", "content": said})
        *_, end = agents.run(llm, messages, tool_choice=choice, **options)
        assert isinstance(end, agents.Finished)
        messages += end.messages
        ends.append(end)
    calls = [done for end in ends for done in end.calls]
    as_it_should_be = shop.orders() == task.orders and shop.cancelled() == task.cancelled
    return {
        "task": " ".join(task.steps),
        "kind": task.kind,
        "completed": as_it_should_be and holds(ends[-1].text, task.says),
        "found": as_it_should_be and holds("\n".join(done.result.text for done in calls), task.says),
        "rounds": sum(end.rounds for end in ends),
        "calls": [f"{done.call.name}({done.call.arguments})" for done in calls],
        "failures": sum(end.failures for end in ends),
        "retries": sum(end.retries for end in ends),
        "answer": ends[-1].text,
    }


def benchmark(options: argparse.Namespace) -> None:
    result = result_head("agent_tasks", options.model, 0.0) | {"weights": options.weights}
    found = []
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        for task in TASKS:
            found.append(one := do(llm, task, options.most_rounds))
            mark = "completed" if one["completed"] else "found" if one["found"] else "-"
            print(f"{one['kind']:<11} {mark:<9} {len(one['calls'])} calls, {one['failures']} failed: {one['task']}")
            print(f"{'':<12}{'; '.join(one['calls'])} -> {one['answer'][:120]!r}", flush=True)
    for kind in (*dict.fromkeys(one["kind"] for one in found), ""):
        some = [one for one in found if kind in ("", one["kind"])]
        print(
            f"{kind or 'all'}: {sum(one['completed'] for one in some)} of {len(some)} completed, "
            f"{sum(one['found'] for one in some)} found, {sum(len(one['calls']) for one in some)} calls, "
            f"{sum(one['failures'] for one in some)} failed, {sum(one['retries'] for one in some)} retries"
        )
    print(f"written to {keep(result | {'tasks': found}, options.out)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--most-rounds", type=positive, default=4, help="for one step")
    run(parser, benchmark)


if __name__ == "__main__":
    main()
