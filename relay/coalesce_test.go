package relay

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lapse-orders/lapse/orders"
)

func testConfig() Config { return Config{}.WithDefaults() }

var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func TestInstantsRoundToTicksSinceTheEpoch(t *testing.T) {
	t.Parallel()
	at := func(s string) time.Time {
		v, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for _, c := range []struct {
		in       string
		tick     time.Duration
		down, up string
	}{
		{"2026-11-30T12:00:00Z", 100 * time.Millisecond, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00Z"},
		{"2026-11-30T12:00:00.001Z", 100 * time.Millisecond, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00.1Z"},
		{"2026-11-30T12:00:00.099Z", 100 * time.Millisecond, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00.1Z"},
		{"2026-11-30T12:00:00.1Z", 100 * time.Millisecond, "2026-11-30T12:00:00.1Z", "2026-11-30T12:00:00.1Z"},
		{"2026-12-31T23:59:59.999Z", time.Second, "2026-12-31T23:59:59Z", "2027-01-01T00:00:00Z"},
		{"2026-11-30T20:00:00.15+08:00", 100 * time.Millisecond, "2026-11-30T12:00:00.1Z", "2026-11-30T12:00:00.2Z"},
		{"2026-11-30T12:00:00.0000001Z", time.Millisecond, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00.001Z"},
		// 700 ms do not divide a day: the multiples count from 1970, not from the year 1.
		{"1970-01-01T00:00:01Z", 700 * time.Millisecond, "1970-01-01T00:00:00.7Z", "1970-01-01T00:00:01.4Z"},
		{"1969-12-31T23:59:59.95Z", 100 * time.Millisecond, "1969-12-31T23:59:59.9Z", "1970-01-01T00:00:00Z"},
		{"9999-12-31T23:59:59.901Z", 100 * time.Millisecond, "9999-12-31T23:59:59.9Z", "10000-01-01T00:00:00Z"},
	} {
		if got := floorTick(at(c.in), c.tick); !got.Equal(at(c.down)) {
			t.Errorf("floorTick(%s, %s) = %s, want %s", c.in, c.tick, got, c.down)
		}
		if c.up == "10000-01-01T00:00:00Z" { // beyond what Parse reads
			continue
		}
		if got := ceilTick(at(c.in), c.tick); !got.Equal(at(c.up)) {
			t.Errorf("ceilTick(%s, %s) = %s, want %s", c.in, c.tick, got, c.up)
		}
	}
}

// aloneDue is when the broker would deliver an order that has a message of its own, written again and differently: the first multiple
// of the tick that is not before it.
func aloneDue(deliverAt time.Time, tick time.Duration) time.Time {
	n := tick.Milliseconds()
	return time.UnixMilli((deliverAt.UnixMilli() + n - 1) / n * n)
}

func TestNoOrderIsEarlierThanItsDeadlineOrLaterThanAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		cfg := testConfig()
		cfg.Tick = rapid.SampledFrom([]time.Duration{time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond, 700 * time.Millisecond, time.Second}).Draw(t, "tick")
		cfg.MaxOrdersPerMessage = rapid.IntRange(1, 5).Draw(t, "limit")
		cfg.MaxDelay = rapid.SampledFrom([]time.Duration{cfg.Tick, 2 * time.Second, time.Hour}).Draw(t, "max delay")
		cfg.Linger = rapid.SampledFrom([]time.Duration{-1, 50 * time.Millisecond, 200 * time.Millisecond, 10 * time.Second}).Draw(t, "linger")
		c := newCoalescer(cfg)

		claims := map[int64]time.Time{} // when the order was claimed, by the database's clock
		deliver := map[int64]time.Time{}
		var out []*message
		now := noon
		var id int64
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			step := time.Duration(rapid.Int64Range(0, 400).Draw(t, "step")) * time.Millisecond
			now = now.Add(step)
			for _, m := range c.flush(now, false) {
				if m.flushAt.After(now) {
					t.Fatalf("flushed %s before its time", m.flushAt.Sub(now))
				}
				out = append(out, m)
			}
			l := &lease{token: fmt.Sprint(id), startBy: now.Add(time.Minute)}
			for range rapid.IntRange(0, 12).Draw(t, "rows") {
				id++
				away := time.Duration(rapid.Int64Range(-3000, 12_000).Draw(t, "deadline in ms")) * time.Millisecond
				claims[id], deliver[id] = now, now.Add(away)
				r := row{Pending: orders.Pending{OrderID: id, DeliverAt: now.Add(away)}, lease: l}
				if full := c.add(r, now, now); full != nil {
					if len(full.rows) != cfg.MaxOrdersPerMessage {
						t.Fatalf("a message of %d was given as full, the limit is %d", len(full.rows), cfg.MaxOrdersPerMessage)
					}
					out = append(out, full)
				}
			}
			// Nothing that is urgent, and nothing for longer than the linger, is left behind by a flush at its time.
			if next := c.next(); !next.IsZero() && next.Sub(now) > max(cfg.Linger, 0) {
				t.Fatalf("next flush in %s, linger is %s", next.Sub(now), cfg.Linger)
			}
		}
		out = append(out, c.flush(now, true)...)
		if len(c.open) != 0 || !c.next().IsZero() {
			t.Fatalf("%d messages are left after a flush of all, next at %s", len(c.open), c.next())
		}

		seen := map[int64]bool{}
		for _, m := range out {
			if len(m.rows) < 1 || len(m.rows) > cfg.MaxOrdersPerMessage {
				t.Fatalf("message of %d orders, the limit is %d", len(m.rows), cfg.MaxOrdersPerMessage)
			}
			if m.due.UnixMilli()%cfg.Tick.Milliseconds() != 0 {
				t.Fatalf("due %s is no multiple of %s", m.due, cfg.Tick)
			}
			for _, r := range m.rows {
				if seen[r.OrderID] {
					t.Fatalf("order %d is in two messages", r.OrderID)
				}
				seen[r.OrderID] = true
				alone, claimed := aloneDue(deliver[r.OrderID], cfg.Tick), claims[r.OrderID]
				switch {
				case r.hop:
					if !deliver[r.OrderID].After(claimed.Add(cfg.MaxDelay)) {
						t.Fatalf("order %d hops though its deadline is in reach", r.OrderID)
					}
					if m.due.After(claimed.Add(cfg.MaxDelay)) || m.due.Before(claimed.Add(cfg.MaxDelay-cfg.Tick)) {
						t.Fatalf("hop of order %d is %s away, want %s less a tick at most", r.OrderID, m.due.Sub(claimed), cfg.MaxDelay)
					}
				case m.due.Before(deliver[r.OrderID]):
					t.Fatalf("order %d is to be delivered at %s, its message is due at %s", r.OrderID, deliver[r.OrderID], m.due)
				case !alone.After(claimed):
					// Overdue: delivered at once, so any due that has passed will do.
					if m.due.After(now) {
						t.Fatalf("overdue order %d waits until %s", r.OrderID, m.due)
					}
				case !m.due.Equal(alone):
					t.Fatalf("order %d would be due at %s alone, its message is due at %s", r.OrderID, alone, m.due)
				}
			}
		}
		if len(seen) != len(deliver) {
			t.Fatalf("%d orders went in, %d came out", len(deliver), len(seen))
		}
	})
}

func TestOverdueOrdersShareOneMessage(t *testing.T) {
	t.Parallel()
	c := newCoalescer(testConfig())
	l := &lease{}
	for i, ago := range []time.Duration{time.Hour, time.Second, 24 * time.Hour, 0} {
		c.add(row{Pending: orders.Pending{OrderID: int64(i), DeliverAt: noon.Add(-ago)}, lease: l}, noon, noon)
	}
	out := c.flush(noon, false)
	if len(out) != 1 || len(out[0].rows) != 4 {
		t.Fatalf("got %d messages, want 1 of 4 orders", len(out))
	}
	// Not the first one's: a due must not lie before the deadline of any order in the message.
	if !out[0].due.Equal(noon) {
		t.Errorf("due %s, want the latest of the deadlines, %s", out[0].due, noon)
	}
}

func TestUrgentOrdersDoNotWaitForOthers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		away  time.Duration
		waits bool
	}{{-time.Hour, false}, {0, false}, {time.Second, false}, {urgent, false}, {urgent + time.Second, true}, {30 * time.Minute, true}} {
		g := newCoalescer(testConfig())
		g.add(row{Pending: orders.Pending{OrderID: 1, DeliverAt: noon.Add(c.away)}, lease: &lease{}}, noon, noon)
		if waits := len(g.flush(noon, false)) == 0; waits != c.waits {
			t.Errorf("an order due in %s waits: %t, want %t", c.away, waits, c.waits)
		}
		if left := len(g.flush(noon.Add(200*time.Millisecond), false)); c.waits && left != 1 {
			t.Errorf("an order due in %s is still waiting when the linger is over", c.away)
		}
	}
}

func TestALongLingerEndsBeforeTheOrderIsUrgent(t *testing.T) {
	t.Parallel()
	cfg := testConfig()
	cfg.Linger = 10 * time.Second
	g := newCoalescer(cfg)
	g.add(row{Pending: orders.Pending{OrderID: 1, DeliverAt: noon.Add(urgent + 2*time.Second)}, lease: &lease{}}, noon, noon)
	if left := g.next().Sub(noon); left != 2*time.Second {
		t.Errorf("an order due in %s lingers for %s, want 2s", urgent+2*time.Second, left)
	}
}

func TestSoonestDueIsSentFirst(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var q queue
		dues := rapid.SliceOf(rapid.IntRange(0, 5)).Draw(t, "dues")
		for i, d := range dues {
			q.push(&message{due: noon.Add(time.Duration(d) * time.Second), rows: []row{{Pending: orders.Pending{OrderID: int64(i)}}}})
		}
		drop := rapid.IntRange(0, 5).Draw(t, "drop")
		var want []int // positions, by due and then by arrival
		for d := range 6 {
			for i, is := range dues {
				if is == d && d != drop {
					want = append(want, i)
				}
			}
		}
		q.removeIf(func(m *message) bool { return m.due.Equal(noon.Add(time.Duration(drop) * time.Second)) })
		var got []int
		for q.head() != nil {
			got = append(got, int(q.pop().rows[0].OrderID))
		}
		if !slices.Equal(got, want) {
			t.Fatalf("order of sending is %v, want %v", got, want)
		}
	})
}

func TestEachRowGoesBackUnderItsOwnLease(t *testing.T) {
	t.Parallel()
	a, b := &lease{token: "a"}, &lease{token: "b"}
	var rows []row
	for i, l := range []*lease{a, b, a, b, b} {
		rows = append(rows, row{Pending: orders.Pending{OrderID: int64(i)}, lease: l})
	}
	got := map[string][]int64{}
	for _, part := range byLease(rows) {
		got[part[0].lease.token] = idsOf(part)
	}
	if !slices.Equal(got["a"], []int64{0, 2}) || !slices.Equal(got["b"], []int64{1, 3, 4}) {
		t.Errorf("rows by lease: %v", got)
	}
}

func TestBackoffDoublesUpToItsMaximumWithJitter(t *testing.T) {
	t.Parallel()
	const low, high = 200 * time.Millisecond, 30 * time.Second
	for failures, full := range map[int]time.Duration{1: low, 2: 2 * low, 3: 4 * low, 8: 128 * low, 9: high, 10: high, 1 << 30: high} {
		seen := map[time.Duration]bool{}
		for range 50 {
			d := backoff(low, high, failures)
			if d < full/2 || d > full {
				t.Fatalf("pause after %d failures is %s, want %s to %s", failures, d, full/2, full)
			}
			seen[d] = true
		}
		if len(seen) < 10 {
			t.Errorf("pause after %d failures has no jitter: %v", failures, seen)
		}
	}
}

// BenchmarkCoalesce is the cost of an order on its way through the coalescer, for a backlog whose orders share ticks or do not.
func BenchmarkCoalesce(b *testing.B) {
	for _, perTick := range []int{500, 50, 1} {
		b.Run(fmt.Sprintf("perTick=%d", perTick), func(b *testing.B) {
			c := newCoalescer(testConfig())
			l := &lease{startBy: noon.Add(time.Minute)}
			const claim = 5000
			rows := make([]row, claim)
			for i := range rows {
				rows[i] = row{Pending: orders.Pending{OrderID: int64(i), DeliverAt: noon.Add(time.Hour + time.Duration(i/perTick)*100*time.Millisecond)}, lease: l}
			}
			b.ReportAllocs()
			messages, n := 0, 0
			for b.Loop() {
				for _, r := range rows {
					if c.add(r, noon, noon) != nil {
						messages++
					}
				}
				messages += len(c.flush(noon, true))
				n += claim
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "orders/s")
			b.ReportMetric(float64(messages)/float64(n), "messages/order")
		})
	}
}
