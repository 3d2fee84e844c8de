package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// Verdict is what a check of the doctor came to.
type Verdict string

// The verdicts.
const (
	Sound      Verdict = "sound"       // a tick
	Wrong      Verdict = "wrong"       // a cross
	NotChecked Verdict = "not checked" // with the reason
)

// Finding is the outcome of one check.
type Finding struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Found   string  `json:"found"`         // the value, or why there is none
	Why     string  `json:"why"`           // it matters
	Fix     string  `json:"fix,omitempty"` // the command that mends it; empty where nothing is wrong
}

// Account is one role's way to the database.
type Account struct {
	Role string // api, relay, consume, reconcile, refund, read, migrate
	Key  string // the configuration key that names it
	DSN  string
}

// DoctorConfig says what [Doctor] looks at. Where a field is empty, what needs it is not checked.
type DoctorConfig struct {
	// Accounts by role, the most capable first: the first that is not migrate or read stands for the database in whatever concerns it as
	// a whole.
	Accounts []Account
	// Replica is the DSN of the read replica.
	Replica string
	// MaxLag is how far the replica may be behind. Default 60 s.
	MaxLag time.Duration
	// Orders has the settings of the stores; its MaxOpenConns is held against the database's limit.
	Orders orders.Config

	// RocketMQ says how to reach the proxy; Topic and Group are those of the timed messages.
	RocketMQ     rmq.Config
	Topic, Group string
	// EventsTopic is where events go. Empty: nowhere.
	EventsTopic string
	// AdminEndpoint is host:port of the broker's remoting server.
	AdminEndpoint string
	// OwnTopic and OwnGroup are for the doctor's own messages.
	OwnTopic, OwnGroup string
	// Tick and MaxDelay are the relay's.
	Tick, MaxDelay time.Duration

	// Unread names environment variables that look like settings and are none.
	Unread []string

	// Timeout is the limit of one check. Default 20 s.
	Timeout time.Duration
	// OldSnapshot is the age from which an open transaction counts as old. Default 5 min: a claim looks at what changed since.
	OldSnapshot time.Duration
}

// WithDefaults gives the configuration with every zero field that has a default replaced by it.
func (c DoctorConfig) WithDefaults() DoctorConfig {
	for d, v := range map[*time.Duration]time.Duration{&c.Timeout: 20 * time.Second, &c.OldSnapshot: 5 * time.Minute, &c.MaxLag: time.Minute} {
		if *d == 0 {
			*d = v
		}
	}
	return c
}

// check is one thing that the doctor looks at.
type check struct {
	name string
	why  string
	run  func(ctx context.Context, d *doctor) result
}

// result is a Finding without what the check itself says.
type result struct {
	verdict    Verdict
	found, fix string
}

func sound(format string, args ...any) result {
	return result{verdict: Sound, found: fmt.Sprintf(format, args...)}
}

// wrong is a cross; fix is the command that mends it, or what to do where there is none.
func wrong(fix, format string, args ...any) result {
	return result{verdict: Wrong, found: fmt.Sprintf(format, args...), fix: fix}
}

// unchecked says why a check could not be made, and in fix what would make it possible.
func unchecked(fix, format string, args ...any) result {
	return result{verdict: NotChecked, found: fmt.Sprintf(format, args...), fix: fix}
}

// checks is everything, in the order in which it is told.
var checks = slices.Concat(
	[]check{{
		name: "environment",
		why:  "A misspelt variable is silently no setting: the default stays in force. Nothing but this tells.",
		run: func(_ context.Context, d *doctor) result {
			if len(d.cfg.Unread) == 0 {
				return sound("every LAPSE_ variable is a setting")
			}
			return wrong("unset it, or spell it as 'lapse config --defaults' does", "%s", strings.Join(d.cfg.Unread, "; "))
		},
	}},
	mysqlChecks, replicaChecks, brokerChecks, clockChecks, tripChecks,
)

// Checks gives the name of every check of the doctor and why it matters, as findings without a verdict.
func Checks() []Finding {
	list := make([]Finding, len(checks))
	for i, c := range checks {
		list[i] = Finding{Name: c.name, Why: c.why}
	}
	return list
}

// doctor is one examination. What several checks need is fetched once, by the first that asks.
type doctor struct {
	cfg  DoctorConfig
	base context.Context // of what is fetched for several checks; ends a second before their limit, so that they can say why
	work sync.WaitGroup  // what is fetched

	primary  func(context.Context) (*database, error)
	follower func(context.Context) (*database, error)
	probe    func(context.Context) (*rmq.Probe, error)
	answers  func(context.Context) (*answers, error)
	settings func(context.Context) (map[string]string, error) // of the broker
	trip     func(context.Context) (*trip, error)
	clock    func(context.Context) (offset, error) // of the database

	mu      sync.Mutex
	closers []func() // guarded by mu
}

// Doctor makes every check, side by side, each within the limit, and gives the findings in a fixed order; tell, where it is not nil, gets
// each as soon as those before it are there. It changes nothing but what its own topic and group hold (which it makes, where there are
// none and it has an AdminEndpoint), and a message there stays pending for MaxDelay. The error is that of ctx, or of a configuration that
// cannot be used.
func Doctor(ctx context.Context, cfg DoctorConfig, tell func(Finding)) ([]Finding, error) {
	return examine(ctx, cfg, checks, tell)
}

func examine(ctx context.Context, cfg DoctorConfig, checks []check, tell func(Finding)) ([]Finding, error) {
	d := &doctor{cfg: cfg.WithDefaults()}
	limited, cancel := context.WithTimeout(ctx, d.cfg.Timeout)
	defer d.end(cancel)
	base, stop := context.WithTimeout(limited, d.cfg.Timeout-min(d.cfg.Timeout/4, time.Second))
	defer stop()
	d.base = base
	d.primary = lazily(d, (*doctor).openPrimary)
	d.follower = lazily(d, (*doctor).openReplica)
	d.probe = lazily(d, (*doctor).openProbe)
	d.answers = lazily(d, (*doctor).ask)
	d.settings = lazily(d, (*doctor).brokerSettings)
	d.clock = lazily(d, (*doctor).databaseClock)
	d.trip = lazily(d, (*doctor).travel)

	results := make([]chan result, len(checks))
	for i, c := range checks {
		results[i] = make(chan result, 1)
		go func() { results[i] <- c.run(limited, d) }() // ends by its context
	}
	// A check that does not heed its context, in a driver's call for one, is not waited for.
	overtime, stopWaiting := context.WithTimeout(context.Background(), d.cfg.Timeout+time.Second)
	defer stopWaiting()
	findings := make([]Finding, len(checks))
	for i, c := range checks {
		var r result
		select {
		case r = <-results[i]:
		case <-overtime.Done():
			select {
			case r = <-results[i]:
			default:
				r = unchecked("", "no answer within %s", d.cfg.Timeout)
			}
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		findings[i] = Finding{Name: c.name, Verdict: r.verdict, Found: r.found, Why: c.why, Fix: r.fix}
		if tell != nil {
			tell(findings[i])
		}
	}
	return findings, nil
}

// end lets go of everything, and waits a moment for what is under way.
func (d *doctor) end(cancel func()) {
	cancel()
	done := make(chan struct{})
	go func() { // ends with the work
		d.work.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, c := range slices.Backward(d.closers) {
			c()
		}
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(3 * time.Second):
	}
}

func (d *doctor) onEnd(c func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closers = append(d.closers, c)
}

// lazily gives a function that fetches something with its first call, within the limit of a check; every call waits for it as long as its
// own context allows.
func lazily[T any](d *doctor, fetch func(*doctor, context.Context) (T, error)) func(context.Context) (T, error) {
	var (
		once  sync.Once
		done  = make(chan struct{})
		value T
		err   error
	)
	return func(ctx context.Context) (T, error) {
		once.Do(func() {
			d.work.Go(func() {
				defer close(done)
				value, err = fetch(d, d.base)
			})
		})
		select {
		case <-done:
			return value, err
		case <-ctx.Done():
			var none T
			return none, errors.New("no answer in time")
		}
	}
}
