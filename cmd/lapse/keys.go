package main

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/api"
	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/sign"
	"github.com/lapse-orders/lapse/orders"
)

// kind is what a value is, in the words of an error message.
type kind string

const (
	kindText     kind = "a text"
	kindInt      kind = "a whole number"
	kindBool     kind = "true or false"
	kindDuration kind = "a duration"
)

// key is one setting. The list of keys says what is allowed; what a key means and its default stand in configs/default.yaml, and a test
// holds that both name the same keys, and that the defaults are those of the libraries.
type key struct {
	name     string
	kind     kind
	min, max time.Duration // of kindDuration
	never    bool          // of kindDuration: the word never is allowed, and is 0
	from, to int64         // of kindInt
	oneOf    []string      // of kindText; empty: any
	form     func(string) error
	secret   bool   // never printed; has a twin with the suffix _file
	fileOf   string // the key whose value is in the file that this key names
}

// env is the name of the environment variable of the key.
func (k key) env() string { return envPrefix + strings.ToUpper(strings.ReplaceAll(k.name, ".", "_")) }

const envPrefix = "LAPSE_"

const day = 24 * time.Hour

// keys is every setting, in the order of default.yaml. The bounds are those of the libraries where they have some; the others keep out
// what can only be a slip, such as an hour where a second was meant.
var keys = slices.Concat(
	secret("mysql.dsn", isDSN),
	secret("mysql.dsn_migrate", isDSN),
	secret("mysql.dsn_relay", isDSN),
	secret("mysql.dsn_consume", isDSN),
	secret("mysql.dsn_refund", isDSN),
	secret("mysql.dsn_reconcile", isDSN),
	secret("mysql.dsn_read", isDSN),
	secret("mysql.dsn_replica", isDSN),
	[]key{
		number("mysql.max_open_conns", 1, 10_000),
		duration("mysql.dial_timeout", time.Millisecond, 10*time.Minute),
		duration("mysql.io_timeout", time.Millisecond, day),

		duration("orders.timeout", time.Millisecond, 366*day),
		text("orders.policies", func(s string) error { _, err := orders.ParsePolicies(s); return refusedAs(err) }),
		duration("orders.max_lifetime", time.Millisecond, 366*day),
		duration("orders.key_retention", time.Minute, 366*day),

		text("rocketmq.endpoints", areEndpoints),
		text("rocketmq.topic", isName),
		text("rocketmq.group", isName),
		text("rocketmq.namespace", nil),
		text("rocketmq.admin_endpoint", isEndpoint),
		text("rocketmq.access_key", nil),
	},
	secret("rocketmq.secret_key", nil),
	secret("rocketmq.security_token", nil),
	[]key{
		duration("rocketmq.request_timeout", 500*time.Millisecond, 10*time.Minute),
		boolean("rocketmq.tls.enabled"),
		text("rocketmq.tls.ca_file", nil),
		text("rocketmq.tls.server_name", nil),
		boolean("rocketmq.tls.insecure_skip_verify"),
		text("rocketmq.tls.cert_file", nil),
		text("rocketmq.tls.key_file", nil),

		duration("relay.tick", time.Millisecond, time.Second),
		number("relay.max_orders_per_message", 1, 500),
		duration("relay.linger", time.Millisecond, time.Hour),
		duration("relay.max_delay", time.Second, 366*day),
		duration("relay.lease", time.Second, day),
		duration("relay.send_timeout", time.Millisecond, 10*time.Minute),
		number("relay.claim_limit", 1, 10_000),
		number("relay.max_in_hand", 1, 1_000_000),
		number("relay.claimers", 1, 64),
		number("relay.senders", 1, 1024),
		number("relay.markers", 1, 1024),
		duration("relay.poll", time.Millisecond, time.Hour),
		duration("relay.backoff_min", time.Millisecond, day),
		duration("relay.backoff_max", time.Millisecond, day),
		duration("relay.pause_max", time.Millisecond, time.Hour),
		duration("relay.purge_interval", time.Millisecond, day),
		number("relay.purge_batch", 1, 500),

		number("consumer.batch_orders", 1, 500),
		duration("consumer.batch_wait", time.Millisecond, time.Second),
		number("consumer.workers", 1, 256),
		number("consumer.max_in_hand", 1, 1_000_000),
		duration("consumer.early_wait", time.Millisecond, time.Minute),
		number("consumer.receivers", 1, 256),
		number("consumer.max_messages", 1, 32),
		duration("consumer.invisible", 10*time.Second, 12*time.Hour),
		duration("consumer.cancel_timeout", 100*time.Millisecond, time.Hour),
		number("consumer.ackers", 1, 256),
		duration("consumer.newer_version_delay", time.Second, time.Hour),
		duration("consumer.backoff_min", time.Millisecond, time.Hour),
		duration("consumer.backoff_max", time.Millisecond, time.Hour),
		duration("consumer.give_up_after", time.Millisecond, day),

		text("reconcile.schedule", isSchedule),
		text("reconcile.timezone", isZone),
		duration("reconcile.grace", time.Millisecond, day),
		duration("reconcile.max_lag", time.Millisecond, day),
		word("reconcile.on_lag", reconcile.OnLagFail, reconcile.OnLagPrimary),
		number("reconcile.page", 1, 1_000_000),
		number("reconcile.batch", 1, 500),
		number("reconcile.workers", 1, 64),
		number("reconcile.rate", 1, 1_000_000),
		number("reconcile.primary_rate", 1, 1_000_000),
		number("reconcile.max_lock_waits", 1, 1_000_000),
		duration("reconcile.pause_lag", time.Millisecond, day),
		duration("reconcile.lease", time.Second, day),
		duration("reconcile.cancel_timeout", 100*time.Millisecond, time.Hour),
		duration("reconcile.outbox_age", time.Second, 366*day),
		duration("reconcile.retry_after", time.Millisecond, day),

		text("gateway.url", payments.CheckURL),
		text("gateway.name", isName),
	},
	secret("gateway.secret", isSecret),
	[]key{
		duration("gateway.timeout", 10*time.Millisecond, time.Minute),
		duration("gateway.decide_within", 10*time.Millisecond, time.Hour),
		number("gateway.concurrency", 1, 1024),
		duration("gateway.hold_min", time.Millisecond, day),
		duration("gateway.hold_max", time.Millisecond, day),
		duration("gateway.give_up_after", time.Second, 366*day),
		number("gateway.breaker_failures", 1, 100_000),
		duration("gateway.breaker_pause", time.Millisecond, time.Hour),

		number("refund.batch", 1, 500),
		duration("refund.lease", 4*time.Second, day),
		duration("refund.poll", time.Millisecond, time.Hour),
		duration("refund.backoff_min", time.Millisecond, day),
		duration("refund.backoff_max", time.Millisecond, day),
		number("refund.max_attempts", 1, 1_000_000),

		duration("outbox.retention", time.Second, 366*day),

		text("events.topic", isName),
		text("events.source", isName),

		orNever(duration("retention.orders", day, 3660*day)),
		duration("retention.events", time.Minute, 366*day),
		duration("retention.parked", day, 3660*day),
		duration("retention.runs", day, 3660*day),
		duration("retention.interval", time.Second, day),
		number("retention.batch", 1, 500),

		duration("shutdown.grace", time.Millisecond, time.Hour),

		text("http.addr", isListenAddr),
		text("http.pprof", isLoopbackAddr),

		text("api.addr", isListenAddr),
	},
	secret("api.tokens", func(s string) error { _, err := api.ParseTokens(s); return refusedAs(err) }),
	secret("api.payment_secret", func(s string) error { _, err := api.ParseSecrets(s); return refusedAs(err) }),
	[]key{
		number("api.max_body", 1<<10, 16<<20),
		number("api.max_in_flight", 1, 100_000),
		duration("api.request_timeout", time.Millisecond, 10*time.Minute),
		duration("api.read_timeout", time.Millisecond, 10*time.Minute),
		duration("api.idle_timeout", time.Millisecond, day),

		text("doctor.topic", isName),
		text("doctor.group", isName),
		duration("doctor.timeout", time.Second, 10*time.Minute),

		word("log.level", "debug", "info", "warn", "error"),
		word("log.format", "auto", "json", "text"),
	},
)

// theKeys finds a key by its name, and theVariables by its environment variable.
var theKeys, theVariables = func() (byName, byEnv map[string]key) {
	byName, byEnv = make(map[string]key, len(keys)), make(map[string]key, len(keys))
	for _, k := range keys {
		byName[k.name], byEnv[k.env()] = k, k
	}
	return byName, byEnv
}()

func text(name string, form func(string) error) key {
	return key{name: name, kind: kindText, form: form}
}
func word(name string, oneOf ...string) key { return key{name: name, kind: kindText, oneOf: oneOf} }
func boolean(name string) key               { return key{name: name, kind: kindBool} }
func number(name string, from, to int64) key {
	return key{name: name, kind: kindInt, from: from, to: to}
}
func duration(name string, least, most time.Duration) key {
	return key{name: name, kind: kindDuration, min: least, max: most}
}
func orNever(k key) key {
	k.never = true
	return k
}
func secret(name string, form func(string) error) []key {
	return []key{
		{name: name, kind: kindText, secret: true, form: form},
		{name: name + "_file", kind: kindText, fileOf: name},
	}
}

// allowed says what a value may be.
func (k key) allowed() string {
	switch {
	case len(k.oneOf) > 0:
		return "one of " + strings.Join(k.oneOf, ", ")
	case k.kind == kindDuration:
		or := ""
		if k.never {
			or = ", or never"
		}
		return fmt.Sprintf("a duration with its unit from %s to %s, such as 500ms, 30s or 5m%s", short(k.min), short(k.max), or)
	case k.kind == kindInt:
		return fmt.Sprintf("a whole number from %d to %d", k.from, k.to)
	}
	return string(k.kind)
}

// parse turns the words of one source into the key's value. The error says what is wrong with them, without repeating them.
func (k key) parse(words string) (any, error) {
	switch k.kind {
	case kindBool:
		switch words {
		case "true":
			return true, nil
		case "false":
			return false, nil
		}
		return nil, errors.New("is neither true nor false")
	case kindInt:
		n, err := strconv.ParseInt(words, 10, 64)
		if err != nil {
			return nil, errors.New("is not a whole number")
		}
		if n < k.from || n > k.to {
			return nil, errors.New("is out of range")
		}
		return n, nil
	case kindDuration:
		if k.never && words == "never" {
			return time.Duration(0), nil
		}
		d, err := time.ParseDuration(words)
		if _, bare := strconv.ParseFloat(words, 64); bare == nil {
			return nil, errors.New("is a number without a unit")
		}
		switch {
		case err != nil:
			return nil, errors.New("is not a duration")
		case d <= 0:
			return nil, errors.New("is not positive")
		case d < k.min || d > k.max:
			return nil, errors.New("is out of range")
		}
		return d, nil
	}
	if len(k.oneOf) > 0 && !slices.Contains(k.oneOf, words) {
		return nil, errors.New("is not allowed")
	}
	if k.form != nil && words != "" {
		if err := k.form(words); err != nil {
			return nil, err
		}
	}
	return words, nil
}

// short writes a duration without its empty units: 1h, not 1h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// isDSN must not repeat the DSN, and the driver's own errors may: it has a password.
func isDSN(s string) error {
	cfg, err := mysql.ParseDSN(s)
	if err != nil {
		return errors.New("cannot be read; expected user:password@tcp(host:port)/database")
	}
	if cfg.DBName == "" {
		return fmt.Errorf("names no database for %s; expected user:password@tcp(host:port)/database", cfg.Addr)
	}
	return nil
}

// refusedAs makes a sentence with the name of the key of an error that has none.
func refusedAs(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("is not usable: %w", err)
}

func isSchedule(s string) error { return refusedAs(reconcile.CheckSchedule(s, "UTC")) }

func isZone(s string) error { return refusedAs(reconcile.CheckSchedule("@daily", s)) }

// isSecret is for what signs our calls; the error does not repeat it.
func isSecret(s string) error {
	if len(s) < sign.MinSecret {
		return fmt.Errorf("has less than %d characters", sign.MinSecret)
	}
	return nil
}

func isName(s string) error {
	if strings.ContainsAny(s, " \t\r\n") {
		return errors.New("has a blank in it")
	}
	return nil
}

func areEndpoints(s string) error {
	for part := range strings.SplitSeq(s, ";") {
		host, port, err := splitAddr(strings.TrimSpace(part))
		if err != nil || host == "" || port == 0 {
			return errors.New("is not host:port, or several of them separated by semicolons")
		}
	}
	return nil
}

// isEndpoint takes host:port of one server.
func isEndpoint(s string) error {
	if host, port, err := splitAddr(s); err != nil || host == "" || port == 0 {
		return errors.New("is not host:port")
	}
	return nil
}

func isListenAddr(s string) error {
	_, _, err := splitAddr(s)
	return err
}

func isLoopbackAddr(s string) error {
	host, _, err := splitAddr(s)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return errors.New("is not on the loopback; profiles show what is in memory, so use 127.0.0.1:PORT")
	}
	return nil
}

func splitAddr(s string) (host string, port uint64, err error) {
	host, p, err := net.SplitHostPort(s)
	if err == nil {
		port, err = strconv.ParseUint(p, 10, 16)
	}
	if err != nil {
		return "", 0, errors.New("is not host:port")
	}
	return host, port, nil
}

// nearest is the candidate that a misspelt name was probably meant to be, or empty. A name without a dot is also held against the last
// parts of the candidates: a key that lacks its section is as common as one with a slip in it.
func nearest(name string, candidates []string) string {
	best, bestCost := "", max(2, len(name)/3)+1
	for _, c := range candidates {
		cost := edits(name, c)
		if i := strings.LastIndexByte(c, '.'); i > 0 && !strings.Contains(name, ".") {
			cost = min(cost, edits(name, c[i+1:]))
		}
		if cost < bestCost {
			best, bestCost = c, cost
		}
	}
	return best
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		before := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := before
			if a[i-1] != b[j-1] {
				cost = 1 + min(before, row[j], row[j-1])
			}
			before, row[j] = row[j], cost
		}
	}
	return row[len(b)]
}
