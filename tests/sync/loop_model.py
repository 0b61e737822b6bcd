"""The whole loop of Streaming DiLoCo in plain NumPy: slow, and the specification on one page.

R regions train vectors of the model, fragment by fragment. Written from DESIGN.md's conventions
(docs/architecture.md), without the package. One step t, counted from 1:

1. every region makes its inner step: theta <- theta - LR g;
2. payloads of earlier steps land where they are due;
3. the fragments whose turn it is are sent, if they are not in flight;
4. payloads without a delay land.
"""

import copy

import numpy as np

LR, OUTER_LR, MOMENTUM, ALPHA = np.float32([0.1, 0.7, 0.9, 0.3])


class Loop:
    """The state of all regions.

    Args:
      start: fragment name -> fp32 vector; period: H; delays_R: steps from a send to each landing.
      feedback: send only the largest entry of what is owed, and keep the rest for the next time.
    """

    def __init__(self, start, period, delays_R, feedback):
        self.period, self.delays_R, self.feedback = period, delays_R, feedback
        self.names, regions = list(start), range(len(delays_R))
        self.t, self.flights = 0, []
        self.anchor = copy.deepcopy(start)
        self.velocity = {p: np.zeros_like(x) for p, x in start.items()}
        self.theta = [copy.deepcopy(start) for _ in regions]
        self.residual = [{p: np.zeros_like(x) for p, x in start.items()} for _ in regions]

    def step(self, gradients_R, takes_part_R):
        """`gradients_R`: by region and fragment; `takes_part_R`: in what is sent at this step."""
        self.t += 1
        for theta, gradient in zip(self.theta, gradients_R):
            for p in self.names:
                theta[p] = theta[p] - LR * gradient[p]
        self.land()
        for number, p in enumerate(self.names):
            first = (number + 1) * self.period // len(self.names)
            turn = self.t >= first and (self.t - first) % self.period == 0
            if turn and all(flight["p"] != p for flight in self.flights) and any(takes_part_R):
                self.send(p, takes_part_R)
        self.land()

    def send(self, p, takes_part_R):
        """What counts of this moment: who takes part, and whose pseudo-gradient is finite."""
        payloads, accepted = {}, set()
        present = [r for r, takes_part in enumerate(takes_part_R) if takes_part]
        for r in present:
            delta = self.anchor[p] - self.theta[r][p]
            if not np.isfinite(delta).all():
                continue  # left out of mean and denominator; its residual stays as it was
            accepted.add(r)
            payloads[r] = delta
            if self.feedback:
                owed = self.residual[r][p] + delta
                payloads[r] = np.where(np.arange(owed.size) == np.abs(owed).argmax(), owed, 0)
                self.residual[r][p] = owed - payloads[r]
        waiting = {r: self.t + self.delays_R[r] for r in present}
        flight = {"p": p, "payloads": payloads, "accepted": accepted, "waiting": waiting}
        self.flights.append({**flight, "moved": False})

    def land(self, everything=False):
        """The anchor moves with the first landing, each region's values with its own."""
        for flight in self.flights:
            p, waiting = flight["p"], flight["waiting"]
            due = [r for r, step in waiting.items() if step <= self.t or everything]
            if due and not flight["moved"]:
                flight["moved"] = True
                if flight["accepted"]:  # else nobody has sent anything: momentum stands still, too
                    mean = sum(flight["payloads"].values()) / np.float32(len(flight["payloads"]))
                    self.velocity[p] = MOMENTUM * self.velocity[p] + mean
                    nesterov = mean + MOMENTUM * self.velocity[p]
                    self.anchor[p] = self.anchor[p] - OUTER_LR * nesterov
            for r in due:
                del waiting[r]
                target, theta = self.anchor[p], self.theta[r][p]
                if r in flight["accepted"]:  # who was left out, and what is not finite, starts anew
                    blended = ALPHA * theta + (1 - ALPHA) * target
                    self.theta[r][p] = np.where(np.isfinite(blended), blended, target)
                else:
                    self.theta[r][p] = target.copy()
        self.flights = [flight for flight in self.flights if flight["waiting"]]
