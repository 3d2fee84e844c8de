// The hub is the one goroutine that knows what is in hand: which rows gather, which messages wait, whether anything may be sent or
// claimed. It never blocks on one thing alone, so that nothing that it waits for can wait for it. Claims, sends and marks go on beside
// it, each with its own bound.

package relay

import (
	"context"
	"slices"
	"time"
)

type hub struct {
	r        *Relay
	wanted   chan int      // hub to claimer: the most rows to claim
	claims   chan claimed  // claimer to hub: one answer for each that was wanted
	out      chan *message // hub to senders
	outcomes chan outcome  // senders to hub: one for each message
	marks    chan mark     // hub and senders to markers
	settled  chan int      // markers to hub: rows that are no longer in hand

	gathering *coalescer
	waiting   queue
	giveBack  []mark   // wait for a marker
	leases    []*lease // whose startBy lies ahead, in that order
	inHand    int      // rows claimed and not settled
	claiming  int      // claims under way
	sending   int      // messages handed out whose outcome is not known: it may come after its rows are settled
	stopping  bool

	nextClaim     time.Time
	backlog       bool // the last claim was full
	claimFailures int  // in a row

	// The gate is open while failures is 0. Otherwise nothing is sent or claimed before reopen, and then one message is the probe that
	// decides.
	failures    int
	lastFailure time.Time
	reopen      time.Time
	probing     bool
	unready     int  // times in a row that the sender said so
	paused      bool // for the gauge
}

// askAgain is how soon at the latest a sender that was not ready is asked again. The question costs nothing, and a connection that
// stands again is used at once.
const askAgain = 200 * time.Millisecond

// patience is how many times in a row a sender may say that it is not ready before urgent orders are given back: about a second, in
// which a connection that was cut stands again.
const patience = 6

// outcome is what the broker said about one message.
type outcome struct {
	probe bool
	tried bool  // a send was started
	err   error // of a send, other than a refusal of the message
}

func newHub(r *Relay) *hub {
	return &hub{
		r:        r,
		wanted:   make(chan int),
		claims:   make(chan claimed),
		out:      make(chan *message),
		outcomes: make(chan outcome),
		// With room, so that senders go on while marks are written, and a marker finds several. The rows in hand bound it.
		marks:     make(chan mark, 64),
		settled:   make(chan int),
		gathering: newCoalescer(r.cfg),
	}
}

// run returns when ctx has ended and nothing is in hand any longer. It calls cutOff when that takes too long.
func (h *hub) run(ctx context.Context, cutOff func()) {
	done := ctx.Done()
	var late <-chan time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		h.collect(now)
		if h.stopping && h.claiming == 0 && h.sending == 0 && h.inHand == 0 {
			h.failures, h.unready = 0, 0
			h.count()
			return
		}

		// A nil channel is never ready: each of these is offered only where it is allowed.
		var out chan *message
		var want chan int
		var marks chan mark
		var next *message
		var back mark
		limit := h.r.cfg.ClaimLimit
		if h.maySend(now) {
			if next = h.waiting.head(); next != nil {
				out, next.probe = h.out, h.failures > 0
			}
			if h.mayClaim(now) {
				want = h.wanted
				if h.failures > 0 {
					limit = 1
				}
			}
		}
		if len(h.giveBack) > 0 {
			marks, back = h.marks, h.giveBack[0]
		}
		timer.Reset(h.idle(now))
		select {
		case <-done:
			done, h.stopping = nil, true
			h.r.setStopping()
			t := time.NewTimer(h.r.cfg.StopTimeout)
			defer t.Stop()
			late = t.C
		case <-late:
			h.r.cfg.Logger.Warn("relay stops with orders in hand; they are sent again when their leases have ended", "orders", h.inHand)
			cutOff()
		case out <- next:
			h.waiting.pop()
			h.sending++
			h.probing = next.probe
		case want <- limit:
			h.claiming++
		case marks <- back:
			h.giveBack = h.giveBack[1:]
		case c := <-h.claims:
			h.take(c)
		case o := <-h.outcomes:
			h.judge(o)
		case n := <-h.settled:
			h.inHand -= n
			h.r.metrics.inHand.Sub(float64(n))
		case <-timer.C:
		}
	}
}

// collect moves the messages that have gathered for long enough to the queue, and gives back those that must not be sent any longer.
func (h *hub) collect(now time.Time) {
	// To wait for more orders makes no sense where no more can be claimed, and a probe is wanted at once.
	all := h.stopping || h.failures > 0 || h.full()
	for _, m := range h.gathering.flush(now, all) {
		h.waiting.push(m)
	}
	expired := false
	for len(h.leases) > 0 && !now.Before(h.leases[0].startBy) {
		h.leases, expired = h.leases[1:], true
	}
	if expired || h.stopping {
		h.back(h.waiting.removeIf(func(m *message) bool { return h.stopping || !now.Before(m.startBy()) }))
	}
}

// back gives rows back that were not sent.
func (h *hub) back(rows []row) {
	h.r.metrics.givenBack.Add(float64(len(rows)))
	for _, part := range byLease(rows) {
		h.giveBack = append(h.giveBack, h.r.unclaim(part))
	}
}

// maySend asks the gate and the sender.
func (h *hub) maySend(now time.Time) bool {
	if h.stopping || h.probing || now.Before(h.reopen) {
		return false
	}
	if h.r.sender.Ready() != nil {
		h.unready++
		h.reopen = now.Add(jittered(min(h.r.cfg.BackoffMin, askAgain)))
		if h.unready == patience {
			h.backUrgent()
		}
	} else {
		h.unready = 0
	}
	h.count()
	return h.unready == 0
}

// backUrgent gives back what would be late if it waited here to the end of its lease: another relay may have a better way to the
// broker. The rest is kept, since rows that are given back leave behind those placed meanwhile.
func (h *hub) backUrgent() {
	h.back(h.waiting.removeIf(func(m *message) bool { return m.due.Before(m.startBy()) }))
}

// full reports whether another claim could bring more rows than may be in hand.
func (h *hub) full() bool { return h.inHand+(h.claiming+1)*h.r.cfg.ClaimLimit > h.r.cfg.MaxInHand }

func (h *hub) mayClaim(now time.Time) bool {
	switch {
	case now.Before(h.nextClaim) || h.full():
		return false
	case h.failures > 0:
		return h.claiming == 0 && len(h.waiting.items) == 0 // otherwise a probe is at hand
	case h.backlog:
		return h.claiming < h.r.cfg.Claimers
	}
	return h.claiming == 0
}

// idle is how long nothing has to be done unless something happens.
func (h *hub) idle(now time.Time) time.Duration {
	next := now.Add(time.Minute)
	for _, at := range []time.Time{h.gathering.next(), h.nextClaim, h.reopen} {
		if at.After(now) && at.Before(next) {
			next = at
		}
	}
	if len(h.leases) > 0 && h.leases[0].startBy.Before(next) {
		next = h.leases[0].startBy
	}
	return next.Sub(now)
}

// take puts claimed rows into messages.
func (h *hub) take(c claimed) {
	h.claiming--
	now := time.Now()
	if c.err != nil {
		h.claimFailures++
		h.backlog = false
		h.nextClaim = now.Add(backoff(h.r.cfg.BackoffMin, h.r.cfg.PauseMax, h.claimFailures))
		h.r.metrics.claimFailures.Inc()
		h.r.setStoreErr(c.err)
		if h.claimFailures == 1 && !h.stopping {
			h.r.cfg.Logger.Warn("outbox cannot be read, will be tried until it can", "err", c.err)
		}
		return
	}
	if h.claimFailures > 0 {
		h.r.cfg.Logger.Info("outbox can be read again", "failures", h.claimFailures)
	}
	h.claimFailures = 0
	h.r.setStoreErr(nil)
	h.backlog, h.nextClaim = len(c.Rows) == c.limit, now
	if !h.backlog {
		h.nextClaim = now.Add(jittered(h.r.cfg.Poll))
	}
	if len(c.Rows) == 0 {
		// Every row that failed here has been tried again since, or another relay sent it: there is nothing left to be paused for.
		if h.failures > 0 && now.Sub(h.lastFailure) > 2*h.r.cfg.BackoffMax {
			h.open()
		}
		return
	}
	l := &lease{token: c.Token, claimedAt: c.start, now: c.Now, startBy: c.start.Add(h.r.cfg.startWithin()), until: c.start.Add(h.r.cfg.Lease)}
	at, _ := slices.BinarySearchFunc(h.leases, l, func(a, b *lease) int { return a.startBy.Compare(b.startBy) })
	h.leases = slices.Insert(h.leases, at, l)
	h.inHand += len(c.Rows)
	h.r.metrics.inHand.Add(float64(len(c.Rows)))
	for _, p := range c.Rows {
		if full := h.gathering.add(row{Pending: p, lease: l}, c.Now, now); full != nil {
			h.waiting.push(full)
		}
	}
}

// judge opens and shuts the gate. Only what was sent through the open gate and the probe count: sends that were under way when it shut
// would only say the same thing several times.
func (h *hub) judge(o outcome) {
	h.sending--
	if o.probe {
		h.probing = false
	}
	switch {
	case !o.tried:
	case o.err == nil && o.probe:
		h.open()
	case o.err != nil && (o.probe || h.failures == 0):
		if h.failures == 0 && !h.stopping {
			h.r.cfg.Logger.Warn("timed message was not sent, the relay pauses", "err", o.err)
		}
		h.failures++
		h.lastFailure = time.Now()
		h.reopen = h.lastFailure.Add(backoff(h.r.cfg.BackoffMin, h.r.cfg.PauseMax, h.failures))
		h.r.setSendErr(o.err)
		h.count()
		if o.probe {
			h.backUrgent() // it was no accident
		}
	}
}

func (h *hub) open() {
	h.r.cfg.Logger.Info("the relay goes on", "failures", h.failures)
	h.r.setSendErr(nil)
	h.failures, h.reopen = 0, time.Time{}
	h.count()
}

// count keeps the gauge of paused relays.
func (h *hub) count() {
	paused := h.failures > 0 || h.unready > 0
	if paused == h.paused {
		return
	}
	h.paused = paused
	if paused {
		h.r.metrics.paused.Inc()
	} else {
		h.r.metrics.paused.Dec()
	}
}
