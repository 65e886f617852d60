"""A tuning job, submitted to the cluster on which an app answers. Not collected with the other tests, since it needs a
cluster with a dashboard, which takes jobs: `test_submitted_job.py` runs it by itself, in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_tasks

from app.builder import build
from tests.asked import ask
from tests.engine_driver import make_prompt
from tests.running_app import APP_NAME, START_LIMIT_S, RunningApp, free_port, wait_until
from tests.serve.own_cluster import ONE_PAIR, ROOT
from tests.tuning.job.job_runs import arguments, found_by, make_files, run
from tuning.report.summary_file import read_summary

ANSWER_TOKENS = 20
WRITTEN = {"study.journal", "inputs.json", "front.parquet", "ttl_policy.json", "serve_config.yaml", "report.html"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One node of two CPUs, with a dashboard. Its agent, which runs the jobs, has a port of its own: another cluster on
    the machine, such as that of the other tests, has the usual one, and without a port an agent takes no jobs."""
    node = {"num_cpus": 2, "object_store_memory": 120 << 20, "include_dashboard": True, "dashboard_host": "127.0.0.1"}
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **ports})
    ray.init(address=cluster.address, namespace="equipoise-tests", logging_level=logging.ERROR)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def takes_jobs(jobs: JobSubmissionClient) -> bool:
    """Whether a node's agent is there to run jobs, which it is a while after the dashboard. Leaves none
    that runs."""
    try:
        job = jobs.submit_job(entrypoint="true")
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        return False
    wait_until(lambda: jobs.get_job_status(job).is_terminal(), START_LIMIT_S, "a job that does nothing did not end")
    return True


def test_answers_keep_coming(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(ONE_PAIR), name=APP_NAME, route_prefix="/")
    app = RunningApp(f"http://127.0.0.1:{port}")
    app.wait_healthy()
    prompt = make_prompt(40, 1, vocab=250)
    expected = ask(app.base_url, prompt, ANSWER_TOKENS).tokens

    make_files(tmp_path)
    dashboard = f"http://{cluster.webui_url}"
    jobs = JobSubmissionClient(dashboard)
    wait_until(lambda: takes_jobs(jobs), START_LIMIT_S, "the cluster did not take jobs")
    given = arguments(tmp_path, "--ray-cpus", "0.5", "--ray", "auto", out="by-job")
    at = given.index("--ray")  # A submitted job need not be told.
    del given[at : at + 2]
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", dashboard]
    job = subprocess.Popen(
        [*command, "--working-dir", ".", "--", sys.executable, "-m", "tuning.job", *given],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while_running = 0
    while job.poll() is None:
        begun = any(each.status == JobStatus.RUNNING for each in jobs.list_jobs() if each.submission_id)
        assert ask(app.base_url, prompt, ANSWER_TOKENS).tokens == expected
        while_running += begun
    said = job.communicate()[0]
    assert job.returncode == 0, said
    # The search itself takes longer than several answers.
    assert while_running >= 3
    assert {path.name for path in (tmp_path / "by-job").iterdir()} > WRITTEN
    assert len(list_tasks(filters=[("name", "=", "_call")])) == 10

    _, here = run(tmp_path, out="here")
    assert found_by(read_summary(tmp_path / "by-job" / "summary.json")) == found_by(here)
