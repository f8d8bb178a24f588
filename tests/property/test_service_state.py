"""A service run under adversarial orders of events: every request is answered once, whole and in order, or given up.

The readers' side is checked by ``tests/fakes/service_world.py`` after every event; workers, orchestrator and broker
fail as in ``test_pipeline_state.py``.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.fakes.service_world import ServiceWorld
from tests.property.exploring import explore
from tests.property.fleet_rules import FleetRules
from transport.contracts.messages import ResumeRequested, StopRequested


class ServiceMachine(FleetRules):
    world: ServiceWorld

    @initialize(
        window=st.sampled_from([1, 4, 1000]),
        max_attempts=st.integers(1, 3),
        max_deaths=st.integers(1, 3),
        claims_at_once=st.booleans(),
    )
    def begin(self, window, max_attempts, max_deaths, claims_at_once):
        self.world = ServiceWorld(window=window, max_attempts=max_attempts, max_deaths=max_deaths)
        self.world.claims_at_once = claims_at_once
        self.world.join()

    def draw_reader(self, data) -> int:
        return data.draw(st.sampled_from([number for number, reader in self.world.readers.items() if reader.open]))

    @precondition(lambda self: len(self.world.readers) < 6 and not self.world.state.view().stop_reason)
    @rule(num_prompts=st.integers(1, 5), group_size=st.integers(1, 3))
    def submit(self, num_prompts, group_size):
        self.world.submit(num_prompts, group_size)

    @rule(anew=st.booleans())
    def publish(self, anew):
        self.world.publish(anew=anew)

    @precondition(lambda self: any(reader.open for reader in self.world.readers.values()))
    @rule(data=st.data(), count=st.integers(1, 4), behind=st.integers(0, 2))
    def read_and_take(self, data, count, behind):
        """It may say that it has less than it read, also less than it said before."""
        number = self.draw_reader(data)
        self.world.read(number, count)
        self.world.take(number, max(0, len(self.world.readers[number].got) - behind))

    @precondition(lambda self: any(reader.open for reader in self.world.readers.values()))
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(self.draw_reader(data))

    @rule(resume=st.booleans())
    def stop(self, resume):
        self.world.tell(StopRequested(reason="ctrl-c"))
        if resume:
            self.world.resume()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.dies_at_next = None
        world.resume()
        world.tell(ResumeRequested())
        world.run_to_answers()
        world.check_answered()
        world.tell(StopRequested(reason="drained"))
        assert world.finished


def test_every_request_is_answered_once_whatever_happens():
    explore(ServiceMachine)
