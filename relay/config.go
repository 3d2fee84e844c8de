package relay

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config has the settings of a [Relay]. The zero value of each field means its default.
type Config struct {
	// Topic of the timed messages; its type must be DELAY. Default order-timeout.
	Topic string
	// Tick is what deadlines are rounded up to, in multiples since the Unix epoch, and has to equal the broker's timerPrecisionMs: with a
	// larger one orders are late by up to the difference, with a smaller one messages are not shared. Whole milliseconds, at most 1 s.
	// Default 100 ms.
	Tick time.Duration
	// MaxOrdersPerMessage bounds a message: its keys are the ids, and a broker takes 16 KiB of properties, some 850 ids. At most 500.
	// Default 500.
	MaxOrdersPerMessage int
	// Linger is how long a row may wait for others of its tick. A row due within 5 s does not wait. Negative: none waits.
	// Default 200 ms.
	Linger time.Duration
	// MaxDelay is the farthest delivery that the broker takes, with some room for clocks that differ. An order whose deadline lies beyond
	// is sent for now + MaxDelay: the message arrives early and the order is timed anew (a hop). Default 23 h 50 min, below the proxy's
	// limit of 1 day.
	MaxDelay time.Duration
	// Lease is how long claimed rows belong to this relay. Default 30 s.
	Lease time.Duration
	// SendTimeout cuts off one send. With Linger it has to fit into half of Lease. Default 5 s.
	SendTimeout time.Duration
	// ClaimLimit is the number of rows of one claim, at most 10,000. Default 5,000.
	ClaimLimit int
	// MaxInHand bounds the rows that are claimed and not marked yet, and with them the memory. Not below ClaimLimit. Default four
	// times ClaimLimit.
	MaxInHand int
	// Claimers is the number of claims in the database at once, in a backlog; otherwise there is one at a time. Default 2.
	Claimers int
	// Senders is the number of messages on their way to the broker at once. Default 8.
	Senders int
	// Markers is the number of marks in the database at once. Default 4.
	Markers int
	// Poll is the pause between claims while there is less to do than a claim would take. Default 100 ms.
	Poll time.Duration
	// BackoffMin and BackoffMax bound the pause of a row whose send failed: doubled with each attempt, with jitter of up to a half.
	// Defaults 200 ms and 30 s.
	BackoffMin, BackoffMax time.Duration
	// PauseMax bounds the pause of the whole relay while broker or database fail; the pause starts at BackoffMin. Default 5 s.
	PauseMax time.Duration
	// PurgeInterval is the time between looks for rows whose retention is over, and PurgeBatch the rows of one look, at most 500.
	// Negative interval: this relay does not purge. Defaults 1 minute and 500.
	PurgeInterval time.Duration
	PurgeBatch    int
	// StopTimeout bounds how long Run goes on when its context has ended. Default 10 s.
	StopTimeout time.Duration
	// Logger gets what an operator should know, never per message. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics lapse_relay_*. Several relays may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

const (
	// urgent is how near a due is whose rows do not wait for others: at 5 s there is room for one failed send and its repetition.
	urgent = 5 * time.Second
	// 500 ids of 19 digits are 9.5 KiB of the 16 KiB that the properties of a message may have; 870 were refused.
	maxOrdersPerMessage = 500
	// The most that a store gives in one claim, and purges in one look.
	maxClaimLimit, maxPurgeBatch = 10_000, 500
	// The coarsest tick that a broker knows.
	maxTick = time.Second
)

// WithDefaults gives the configuration with every zero field replaced by its default.
func (c Config) WithDefaults() Config {
	c.Topic = cmp.Or(c.Topic, "order-timeout")
	c.Tick = cmp.Or(c.Tick, 100*time.Millisecond)
	c.MaxOrdersPerMessage = cmp.Or(c.MaxOrdersPerMessage, maxOrdersPerMessage)
	c.Linger = cmp.Or(c.Linger, 200*time.Millisecond)
	c.MaxDelay = cmp.Or(c.MaxDelay, 23*time.Hour+50*time.Minute)
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.SendTimeout = cmp.Or(c.SendTimeout, 5*time.Second)
	c.ClaimLimit = cmp.Or(c.ClaimLimit, 5000)
	c.MaxInHand = cmp.Or(c.MaxInHand, 4*c.ClaimLimit)
	c.Claimers = cmp.Or(c.Claimers, 2)
	c.Senders = cmp.Or(c.Senders, 8)
	c.Markers = cmp.Or(c.Markers, 4)
	c.Poll = cmp.Or(c.Poll, 100*time.Millisecond)
	c.BackoffMin = cmp.Or(c.BackoffMin, 200*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, 30*time.Second)
	c.PauseMax = cmp.Or(c.PauseMax, 5*time.Second)
	c.PurgeInterval = cmp.Or(c.PurgeInterval, time.Minute)
	c.PurgeBatch = cmp.Or(c.PurgeBatch, maxPurgeBatch)
	c.StopTimeout = cmp.Or(c.StopTimeout, 10*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// validate checks a configuration that has its defaults; the error names every field that is off.
func (c Config) validate() error {
	var errs []error
	refuse := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	refuse(!strings.ContainsAny(c.Topic, " \t\r\n"), "Topic %q has a blank in it", c.Topic)
	refuse(c.Tick > 0 && c.Tick <= maxTick && c.Tick%time.Millisecond == 0, "Tick is %s; it must be whole milliseconds, 1ms to %s", c.Tick, maxTick)
	for _, n := range []struct {
		name         string
		is, from, to int
	}{
		{"MaxOrdersPerMessage", c.MaxOrdersPerMessage, 1, maxOrdersPerMessage},
		{"ClaimLimit", c.ClaimLimit, 1, maxClaimLimit},
		{"MaxInHand", c.MaxInHand, c.ClaimLimit, 1_000_000},
		{"Claimers", c.Claimers, 1, 64},
		{"Senders", c.Senders, 1, 1024},
		{"Markers", c.Markers, 1, 1024},
		{"PurgeBatch", c.PurgeBatch, 1, maxPurgeBatch},
	} {
		refuse(n.is >= n.from && n.is <= n.to, "%s is %d; it must be %d to %d", n.name, n.is, n.from, n.to)
	}
	for _, d := range []struct {
		name string
		is   time.Duration
	}{
		{"Lease", c.Lease}, {"SendTimeout", c.SendTimeout}, {"Poll", c.Poll}, {"BackoffMin", c.BackoffMin}, {"PauseMax", c.PauseMax},
		{"StopTimeout", c.StopTimeout},
	} {
		refuse(d.is > 0, "%s is %s; it must be positive", d.name, d.is)
	}
	refuse(c.MaxDelay >= c.Tick, "MaxDelay is %s; it must be at least Tick, %s", c.MaxDelay, c.Tick)
	refuse(c.BackoffMax >= c.BackoffMin, "BackoffMax is %s; it must be at least BackoffMin, %s", c.BackoffMax, c.BackoffMin)
	refuse(max(c.Linger, 0)+c.SendTimeout <= c.Lease/2, "Linger %s and SendTimeout %s together must be at most half of Lease, %s: a send has to end before the lease does", c.Linger, c.SendTimeout, c.Lease)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("relay configuration: %w", err)
	}
	return nil
}

// startWithin is how long after a claim a send may still be started. It ends at the latest SendTimeout later, and a sixth of the lease
// is then left for the mark and for a process that was not scheduled.
func (c Config) startWithin() time.Duration { return c.Lease - c.Lease/6 - c.SendTimeout }
