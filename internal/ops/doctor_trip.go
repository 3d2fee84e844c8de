package ops

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
)

// What a clock may differ from another's: within it consumers wait, and nobody notices.
const tolerated = time.Second

// offset is how far a clock is ahead of this host's: somewhere between low and high.
type offset struct{ low, high time.Duration }

// around is what a question tells that was asked at sent and answered at received.
func around(clock, sent, received time.Time) offset {
	return offset{low: clock.Sub(received), high: clock.Sub(sent)}
}

// minus is the offset to another clock.
func (o offset) minus(other offset) offset {
	return offset{low: o.low - other.high, high: o.high - other.low}
}

func (o offset) middle() time.Duration { return (o.low + o.high) / 2 }

// least is by how much the clocks differ in any case.
func (o offset) least() time.Duration {
	switch {
	case o.low > 0:
		return o.low
	case o.high < 0:
		return -o.high
	}
	return 0
}

func (o offset) judge(what string) result {
	half := (o.high - o.low) / 2
	switch {
	case o.least() > tolerated:
		where := "ahead"
		if o.middle() < 0 {
			where = "behind"
		}
		return wrong("run chrony or ntpd on all hosts: chronyc tracking; slew the broker's clock, never step it", "%s is %s %s (give or take %s)", what, shorter(o.middle().Abs()), where, shorter(half))
	case half > tolerated:
		return unchecked("", "the question took %s, too long to compare clocks", shorter(2*half))
	}
	return sound("%s differs by %s (give or take %s)", what, shorter(o.middle().Abs()), shorter(half))
}

func shorter(d time.Duration) time.Duration {
	if d >= 10*time.Second {
		return d.Round(time.Second)
	}
	return d.Round(time.Millisecond)
}

// databaseClock asks several times and believes the quickest answer.
func (d *doctor) databaseClock(ctx context.Context) (offset, error) {
	db, err := d.primary(ctx)
	if err != nil {
		return offset{}, err
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return offset{}, err
	}
	defer conn.Close() //nolint:errcheck // it goes back to the pool
	var best offset
	for i := range 5 {
		var text string
		sent := time.Now()
		if err := conn.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(6) AS CHAR)").Scan(&text); err != nil {
			return offset{}, err
		}
		received := time.Now()
		clock, err := time.ParseInLocation("2006-01-02 15:04:05.999999", text, time.UTC)
		if err != nil {
			return offset{}, err
		}
		if o := around(clock, sent, received); i == 0 || o.high-o.low < best.high-best.low {
			best = o
		}
	}
	return best, nil
}

var clockChecks = []check{
	{
		name: "clock.database",
		why:  "Only the database's clock decides what is due, but this host's says what its log and its signatures mean.",
		run: onPrimary(func(ctx context.Context, d *doctor, _ *database) result {
			o, err := d.clock(ctx)
			if err != nil {
				return failed("ask the database for the time", err)
			}
			return o.judge("the database's clock")
		}),
	},
	{
		name: "clock.broker",
		why:  "A broker whose clock is behind the database's makes every cancel late by that; one ahead rings early and is asked again.",
		run: onTrip(func(ctx context.Context, d *doctor, t *trip) result {
			broker, whose := t.clock, "the broker's clock, compared with this host's,"
			if db, err := d.clock(ctx); err == nil {
				broker, whose = t.clock.minus(db), "the broker's clock, compared with the database's,"
			}
			return broker.judge(whose)
		}),
	},
}

// trip is what the doctor's own messages have shown.
type trip struct {
	clock   offset // of the broker
	far     error  // why the message for MaxDelay was refused; nil: it was taken
	legs    []leg
	missing int  // messages that did not arrive
	others  bool // another doctor is at work on the same topic
}

// leg is one timed message there and back.
type leg struct {
	due      time.Time
	stored   time.Time     // when the timer fired, by the broker's clock
	received time.Duration // after it was due, by the broker's clock, as well as it is known
}

// errNoOwnTopic says that the doctor's own topic or group is not there.
type errNoOwnTopic struct{ what, fix string }

func (e errNoOwnTopic) Error() string { return e.what }

// The phases of the messages within two seconds. Each is a multiple of 100 ms and of no coarser precision, so that the coarsest precision
// that explains all of them is the broker's.
var phases = []time.Duration{100, 500, 900, 1100, 1500, 1900}

// travel sends messages to the doctor's own topic and takes them back: one that is due at once, for the clock; one for MaxDelay, which
// stays; and some that are due within seconds.
func (d *doctor) travel(ctx context.Context) (*trip, error) {
	if d.cfg.OwnTopic == "" || d.cfg.OwnGroup == "" {
		return nil, errNoOwnTopic{"doctor.topic or doctor.group is empty", ""}
	}
	p, err := d.probe(ctx)
	if err != nil {
		return nil, err
	}
	there, err := d.ensureOwn(ctx)
	if err != nil {
		return nil, err
	}
	for {
		_, err := topicTypes(ctx, p, d.cfg.OwnTopic)
		if err == nil {
			break
		}
		if !rmq.IsNoTopic(err) {
			return nil, err
		}
		if !there {
			return nil, errNoOwnTopic{"topic " + d.cfg.OwnTopic + " is not there", createTopic(d.cfg.OwnTopic, admin.Delay) + "; " + createGroup(d.cfg.OwnGroup, leastRetries)}
		}
		// The proxy has said so before, and says it for 20 s.
		if pause(ctx, 500*time.Millisecond) != nil {
			return nil, fmt.Errorf("topic %s is there, and the proxy does not know it yet; ask again", d.cfg.OwnTopic)
		}
	}
	v, err := p.Visit(ctx, d.cfg.OwnGroup, d.cfg.OwnTopic)
	if rmq.IsNoGroup(err) {
		return nil, errNoOwnTopic{"group " + d.cfg.OwnGroup + " is not there", createGroup(d.cfg.OwnGroup, leastRetries)}
	}
	if err != nil {
		return nil, err
	}
	defer v.Leave()

	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	run := hex.EncodeToString(b[:])
	t := &trip{}
	t.far = far(ctx, d, v, run)

	sent := time.Now()
	if _, err := v.Send(ctx, run+" clock", sent.Add(-time.Hour)); err != nil {
		return nil, err
	}
	returned := time.Now()
	waiting := map[string]time.Time{run + " clock": {}}
	if err := t.collect(ctx, v, run, waiting, func(m rmq.Stored, _ time.Time) {
		// The stamp is cut to whole milliseconds.
		t.clock = around(m.StoredAt, sent, returned)
		t.clock.high += time.Millisecond
	}); err != nil {
		return nil, fmt.Errorf("a message that was due at once has not come back: %w", err)
	}

	// Phases are of the broker's clock.
	base := time.Now().Add(t.clock.middle() + 1200*time.Millisecond).Truncate(time.Second).Add(time.Second)
	for i, phase := range phases {
		due := base.Add(phase * time.Millisecond)
		body := run + " " + strconv.Itoa(i)
		if _, err := v.Send(ctx, body, due); err != nil {
			return nil, err
		}
		waiting[body] = due
	}
	// What has not come by then does not; the rest of the limit is for the answer.
	wait, cancel := context.WithTimeout(ctx, max(0, d.left(ctx)-time.Second))
	defer cancel()
	err = t.collect(wait, v, run, waiting, func(m rmq.Stored, due time.Time) {
		t.legs = append(t.legs, leg{due: due, stored: m.StoredAt, received: m.ReceivedAt.Add(t.clock.middle()).Sub(due)})
	})
	t.missing = len(waiting)
	if err != nil && wait.Err() == nil {
		return nil, err
	}
	return t, nil
}

func (d *doctor) left(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return time.Until(deadline)
	}
	return d.cfg.Timeout
}

// far sends the message for MaxDelay. It is taken back when a doctor runs after that; until then it is one entry in the broker's wheel.
func far(ctx context.Context, d *doctor, v *rmq.Visit, run string) error {
	_, err := v.Send(ctx, run+" far", time.Now().Add(d.cfg.MaxDelay))
	return err
}

// ensureOwn makes the doctor's topic and group where they are missing and the broker can be administered. It is asked before the proxy is,
// which remembers for 20 s that a topic was not there. It says whether the topic is there; false where that cannot be seen.
func (d *doctor) ensureOwn(ctx context.Context) (there bool, err error) {
	if d.cfg.AdminEndpoint == "" {
		return false, nil
	}
	c := admin.New(d.cfg.AdminEndpoint)
	topic, group := d.inAdmin(d.cfg.OwnTopic), d.inAdmin(d.cfg.OwnGroup)
	if _, err := c.Topic(ctx, topic); errors.Is(err, admin.ErrNotFound) {
		if err := c.CreateTopic(ctx, topic, admin.Delay, 2); err != nil {
			// The broker names its name servers as it knows them, which in a container is no address for us: that they know the topic cannot
			// be seen then, and the proxy is asked until it does.
			if _, missing := c.Topic(ctx, topic); missing != nil {
				return false, err
			}
		}
	} else if err != nil {
		return false, nil // the proxy may know it; what is wrong with the administration, others say
	}
	if _, err := c.Group(ctx, group); errors.Is(err, admin.ErrNotFound) {
		if err := c.CreateGroup(ctx, group, leastRetries); err != nil {
			return true, err
		}
	}
	return true, nil
}

// collect receives until nothing is waited for any more. What earlier doctors have left is taken away; what another doctor has sent just now
// is left to it.
func (t *trip) collect(ctx context.Context, v *rmq.Visit, run string, waiting map[string]time.Time, arrived func(rmq.Stored, time.Time)) error {
	for len(waiting) > 0 {
		got, err := v.Receive(ctx)
		for _, m := range got {
			due, ours := waiting[m.Body]
			switch {
			case ours:
				delete(waiting, m.Body)
				arrived(m, due)
			case !strings.HasPrefix(m.Body, run) && time.Since(m.StoredAt) < time.Minute && !strings.HasSuffix(m.Body, " far"):
				t.others = true
				continue
			}
			if err := v.Ack(ctx, m); err != nil && ctx.Err() != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if err := pause(ctx, 200*time.Millisecond); err != nil {
				return err
			}
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// onTrip makes a check of one that needs the doctor's own messages.
func onTrip(run func(ctx context.Context, d *doctor, t *trip) result) func(context.Context, *doctor) result {
	return func(ctx context.Context, d *doctor) result {
		t, err := d.trip(ctx)
		if none, ok := errors.AsType[errNoOwnTopic](err); ok {
			return unchecked(none.fix, "%s", none.what)
		}
		if err != nil {
			return unchecked("", "no message of the doctor has come back: %v", err)
		}
		return run(ctx, d, t)
	}
}

// precisions that RocketMQ knows (timerPrecisionMs), from the coarsest.
var precisions = []time.Duration{time.Second, 500 * time.Millisecond, 200 * time.Millisecond, 100 * time.Millisecond}

// precision is the coarsest one that explains when the timers fired, and how much later than it explains the latest one was: on a busy
// broker a fine precision can look like a coarse one, but hardly to the millisecond.
func (t *trip) precision() (p, residue time.Duration) {
	for _, p = range precisions {
		fits := true
		residue = 0
		for _, l := range t.legs {
			// Multiples are counted from the Unix epoch.
			tick := time.UnixMilli((l.due.UnixMilli() + p.Milliseconds() - 1) / p.Milliseconds() * p.Milliseconds())
			late := l.stored.Sub(tick)
			fits = fits && late >= 0
			residue = max(residue, late)
		}
		if fits {
			return p, residue
		}
	}
	return p, residue
}

var tripChecks = []check{
	{
		name: "broker.max_delay",
		why:  "An order due later than relay.max_delay is sent in hops; if the broker takes less than that, it refuses the message and the order is parked.",
		run: onTrip(func(_ context.Context, d *doctor, t *trip) result {
			switch {
			case rmq.IsTooFar(t.far):
				return wrong("set LAPSE_RELAY_MAX_DELAY below the proxy's maxDelayTimeMills (1 day by default), or raise that", "a message for %s ahead is refused: %v", d.cfg.MaxDelay, t.far)
			case t.far != nil && !silent(t.far):
				return wrong("set LAPSE_RELAY_MAX_DELAY below timerMaxDelaySec of the broker, or raise that", "a message for %s ahead is refused: %v", d.cfg.MaxDelay, t.far)
			case t.far != nil:
				return unchecked("", "%v", t.far)
			}
			timeouts := d.cfg.Orders.WithDefaults()
			hops := ""
			if timeouts.MaxLifetime > d.cfg.MaxDelay {
				hops = fmt.Sprintf("; a deadline farther away (orders.max_lifetime is %s) goes in hops", timeouts.MaxLifetime)
			}
			return sound("%s ahead is taken%s", d.cfg.MaxDelay, hops)
		}),
	},
	{
		name: "broker.precision",
		why:  "The relay makes one message of all orders of a tick. With a coarser broker all are later; with a finer one its messages are more than needed, or late by the tick.",
		run: func(ctx context.Context, d *doctor) result {
			judge := func(p time.Duration, how string) result {
				if p != d.cfg.Tick {
					return wrong(fmt.Sprintf("set LAPSE_RELAY_TICK=%s; or timerPrecisionMs=%d on a broker with an empty store", p, d.cfg.Tick.Milliseconds()), "the broker's tick is %s (%s), relay.tick is %s", p, how, d.cfg.Tick)
				}
				return sound("%s (%s), as relay.tick", p, how)
			}
			if d.cfg.AdminEndpoint != "" {
				if settings, err := d.settings(ctx); err == nil {
					ms, err := strconv.Atoi(settings["timerPrecisionMs"])
					if err != nil {
						return failed("read timerPrecisionMs", err)
					}
					return judge(time.Duration(ms)*time.Millisecond, "timerPrecisionMs")
				}
			}
			return onTrip(func(_ context.Context, d *doctor, t *trip) result {
				if len(t.legs) < len(phases) {
					return unchecked(noAdmin, "too few messages came back to measure it")
				}
				p, residue := t.precision()
				if p > d.cfg.Tick && residue > p/4 {
					return unchecked(noAdmin, "the broker is too busy to measure it: a timer fired %s later than its tick", shorter(residue))
				}
				return judge(p, fmt.Sprintf("measured with %d messages", len(t.legs)))
			})(ctx, d)
		},
	},
	{
		name: "broker.timed_message",
		why:  "The whole way of an order's alarm: accepted, kept, rung on time, received, acknowledged.",
		run: onTrip(func(_ context.Context, d *doctor, t *trip) result {
			const fix = "mqadmin brokerStatus -n NAMESERVER:9876 -b HOST:10911: timerReadBehind, timerOffsetBehind; and the broker's log"
			var latest time.Duration
			for _, l := range t.legs {
				if l.stored.Before(l.due) {
					return wrong("timerRocksDBEnable=false in broker.conf", "a message rang %s early", shorter(l.due.Sub(l.stored)))
				}
				latest = max(latest, l.received)
			}
			sent := len(t.legs) + t.missing
			switch {
			case t.missing > 0 && t.others:
				return unchecked("", "another doctor is at work on %s; run it again", d.cfg.OwnTopic)
			case t.missing > 0:
				return wrong(fix, "%d of %d messages did not come back within seconds of their time", t.missing, sent)
			}
			return sound("%d of %d are back, the last %s after it was due", len(t.legs), sent, shorter(latest))
		}),
	},
}
