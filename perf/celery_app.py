"""The Celery application of the contestant of that name, as its processes import it."""

import os

import bodies
from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_REDIS"], backend=os.environ["BENCH_REDIS"])
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=64,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
TASKS = {
    body.__name__: app.task(name=body.__name__)(body)
    for body in (bodies.noop, bodies.cpu, bodies.shared, bodies.stamp)
}
