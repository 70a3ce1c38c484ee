"""Thirty small jobs that take several calls each: does the model get them done, and how often does it try again?

    python bench/agent_tasks.py --model qwen2.5-coder-0.5b

Ten with a calculator, ten in a folder of files, ten in a shop whose orders are in SQLite. Each job has a check of its
own: the answer holds what was asked for, or the shop's tables are as they should be. `completed` counts those, and
`retries` the calls of a tool whose last call had failed. All greedily, through `openk3.agents`.

Accuracy is no matter of time: the machine need not be idle.
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

SYSTEM = "Use the tools to do what the user asks, one step at a time. When it is done, answer in one short sentence."

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
        says: numbers and words that the answer has to hold.
        orders, cancelled: what has to be in the shop afterwards, and nothing else.
    """

    kind: str
    ask: str
    says: tuple[str, ...] = ()
    orders: frozenset[tuple[int, int, int]] = frozenset()
    cancelled: frozenset[int] = frozenset()


def _tasks() -> list[Task]:
    sums = [
        ("Multiply 17 by 23, then add 119 to the result.", "510"),
        ("What is 12.5 % of 864? Then subtract 8 from that.", "100"),
        ("Compute 2**15, then divide it by 64.", "512"),
        ("A rectangle is 37 by 48. Compute its area, then a third of the area.", "592"),
        ("Add 1234 and 4321, then multiply the sum by 3.", "16665"),
        ("Compute the square root of 7225, then multiply it by 11.", "935"),
        ("7 boxes hold 144 pens each, and 59 pens are sold. How many are left?", "949"),
        ("Convert 5 hours and 20 minutes to minutes, then to seconds.", "19200"),
        ("A price of 250 is raised by 20 %, and then lowered by 10 %. What is it now?", "270"),
        ("Compute 99 * 99, and then subtract 98 * 100 from it.", "1"),
    ]
    finds = [
        ("Which room is the meeting of the Falcon project in?", "B12"),
        ("What is the phone number of the person who leads the Heron project?", "5572"),
        ("How much rent is paid for the Oslo office?", "4200"),
        ("Who is the landlord of the Porto office?", "Ribeira"),
        ("What does the Falcon budget say for travel?", "3500"),
        ("What must be done if the printer shows error E42?", "toner"),
        ("For how many seconds must the button of the router be held?", "12"),
        ("When is the next review of the Heron project?", "2 April"),
        ("What does Anna like to drink? Look in the folder people.", "tea"),
        ("In which year does the lease of the Oslo office end?", "2027"),
    ]
    shop = [
        ("Order 2 red mugs for Anna.", {"orders": {(1, 1, 2)}}),
        ("Order 1 coffee grinder for Chen.", {"orders": {(3, 4, 1)}}),
        ("Order 12 spoons for Bruno.", {"orders": {(2, 5, 12)}}),
        ("Order 3 tea pots for Chen.", {"orders": {(3, 3, 3)}}),
        ("Cancel the open order of Anna.", {"cancelled": {1}}),
        ("Cancel Bruno's order of 4 red mugs.", {"cancelled": {2}}),
        ("Which city does Chen live in?", {"says": ("Xiamen",)}),
        ("What does a tea pot cost?", {"says": ("24",)}),
        ("How many orders does Bruno have?", {"says": ("2|two",)}),
        ("Is the blue mug in stock? If not, order 1 red mug for Bruno instead.", {"orders": {(2, 1, 1)}}),
    ]
    return [
        *(Task("calculator", ask, (answer,)) for ask, answer in sums),
        *(Task("files", ask, (answer,)) for ask, answer in finds),
        *(
            Task(
                "shop",
                ask,
                given.get("says", ()),
                frozenset(given.get("orders", ())),
                frozenset(given.get("cancelled", ())),
            )
            for ask, given in shop
        ),
    ]


def is_done(task: Task, answer: str, shop: Shop) -> bool:
    text = answer.replace(",", "")
    said = all(re.search(rf"(?<![\w.])({words})(?!\w|\.\d)", text, re.IGNORECASE) for words in task.says)
    return said and shop.orders() == task.orders and shop.cancelled() == task.cancelled


def do(llm: LLM, task: Task, rounds: int) -> dict[str, Any]:
    shop = Shop()
    tools: dict[str, Sequence[Any]] = {
        "calculator": ["calculator"],
        "files": [list_files, search_files, read_file],
        "shop": shop.tools,
    }
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.ask}]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 300, "max_rounds": rounds}
    *_, end = agents.run(llm, messages, tools=tools[task.kind], **options)
    assert isinstance(end, agents.Finished)
    return {
        "task": task.ask,
        "kind": task.kind,
        "completed": is_done(task, end.text, shop),
        "rounds": end.rounds,
        "calls": [f"{done.call.name}({done.call.arguments})" for done in end.calls],
        "failures": end.failures,
        "retries": end.retries,
        "answer": end.text,
    }


def benchmark(options: argparse.Namespace) -> None:
    result = result_head("agent_tasks", options.model, 0.0) | {"weights": options.weights}
    found = []
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        for task in _tasks():
            found.append(one := do(llm, task, options.most_rounds))
            mark = "done" if one["completed"] else "not done"
            print(f"{one['kind']:<11} {mark:<9} {len(one['calls'])} calls, {one['failures']} failed: {one['task']}")
            print(f"{'':<12}{'; '.join(one['calls'])} -> {one['answer'][:120]!r}", flush=True)
    for kind in dict.fromkeys(one["kind"] for one in found):
        some = [one for one in found if one["kind"] == kind]
        calls = sum(len(one["calls"]) for one in some)
        print(
            f"{kind}: {sum(one['completed'] for one in some)} of {len(some)} completed, {calls} calls, "
            f"{sum(one['failures'] for one in some)} failed, {sum(one['retries'] for one in some)} retries"
        )
    print(f"written to {keep(result | {'tasks': found}, options.out)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--most-rounds", type=positive, default=8)
    run(parser, benchmark)


if __name__ == "__main__":
    main()
