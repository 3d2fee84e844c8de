package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"github.com/lapse-orders/lapse/configs"
	"github.com/lapse-orders/lapse/consumer"
	"github.com/lapse-orders/lapse/internal/api"
	"github.com/lapse-orders/lapse/internal/ops"
	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestDefaultYAMLHasEveryKeyInTheOrderOfTheList(t *testing.T) {
	t.Parallel()
	var doc yaml.Node
	if err := yaml.Unmarshal(configs.Default, &doc); err != nil {
		t.Fatal(err)
	}
	var names []string
	var walk func(prefix string, n *yaml.Node)
	walk = func(prefix string, n *yaml.Node) {
		for i := 0; i < len(n.Content); i += 2 {
			name, value := prefix+n.Content[i].Value, n.Content[i+1]
			if value.Kind == yaml.MappingNode {
				walk(name+".", value)
			} else {
				names = append(names, name)
			}
		}
	}
	walk("", doc.Content[0])
	if want := keyNames(); !slices.Equal(names, want) {
		t.Errorf("default.yaml has the keys\n%v\nthe list has\n%v", names, want)
	}
}

func TestEveryKeyHasAFieldAndAVariableOfItsOwn(t *testing.T) {
	t.Parallel()
	var fields []string
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			name := prefix + f.Tag.Get("mapstructure")
			if f.Type.Kind() == reflect.Struct {
				walk(name+".", f.Type)
			} else {
				fields = append(fields, name)
			}
		}
	}
	walk("", reflect.TypeFor[settings]())
	if want := keyNames(); !slices.Equal(fields, want) {
		t.Errorf("settings has the fields\n%v\nthe list has the keys\n%v", fields, want)
	}
	variables := map[string]string{}
	for _, k := range keys {
		if other, taken := variables[k.env()]; taken {
			t.Errorf("%s is the variable of %s and of %s", k.env(), other, k.name)
		}
		variables[k.env()] = k.name
		if notOurs(k.env()) {
			t.Errorf("the variable of %s, %s, is not read", k.name, k.env())
		}
	}
}

// A default lives once, in the library; default.yaml shows it.
func TestDefaultsAreThoseOfTheLibraries(t *testing.T) {
	t.Parallel()
	cfg := mustLoad(t, sources{})
	o := orders.Config{}.WithDefaults()
	r := relay.Config{}.WithDefaults()
	c := consumer.Config{}.WithDefaults()
	q := rmq.Config{}.WithDefaults()
	h := api.Config{}.WithDefaults()
	g := payments.GateConfig{}.WithDefaults()
	p := payments.HTTPConfig{}.WithDefaults()
	w := payments.WorkerConfig{}.WithDefaults()
	n := reconcile.Config{}.WithDefaults()
	for _, d := range []struct {
		key     string
		is, lib any
	}{
		{"mysql.max_open_conns", cfg.MySQL.MaxOpenConns, o.MaxOpenConns},
		{"mysql.dial_timeout", cfg.MySQL.DialTimeout, o.DialTimeout},
		{"mysql.io_timeout", cfg.MySQL.IOTimeout, o.IOTimeout},
		{"orders.timeout", cfg.Orders.Timeout, o.Timeout},
		{"orders.max_lifetime", cfg.Orders.MaxLifetime, o.MaxLifetime},
		{"orders.key_retention", cfg.Orders.KeyRetention, o.KeyRetention},
		{"outbox.retention", cfg.Outbox.Retention, o.OutboxRetention},
		{"retention.orders", cfg.Retention.Orders, o.Retention.Orders},
		{"retention.events", cfg.Retention.Events, o.Retention.Events},
		{"retention.parked", cfg.Retention.Parked, o.Retention.Parked},
		{"retention.runs", cfg.Retention.Runs, o.Retention.Runs},
		{"events.source", cfg.Events.Source, relay.EventsConfig{}.WithDefaults().Source},
		{"relay.lease", cfg.Relay.Lease, relay.EventsConfig{}.WithDefaults().Lease},
		{"relay.send_timeout", cfg.Relay.SendTimeout, relay.EventsConfig{}.WithDefaults().SendTimeout},
		{"relay.senders", cfg.Relay.Senders, relay.EventsConfig{}.WithDefaults().Senders},
		{"relay.poll", cfg.Relay.Poll, relay.EventsConfig{}.WithDefaults().Poll},
		{"relay.backoff_min", cfg.Relay.BackoffMin, relay.EventsConfig{}.WithDefaults().BackoffMin},
		{"relay.backoff_max", cfg.Relay.BackoffMax, relay.EventsConfig{}.WithDefaults().BackoffMax},
		{"relay.pause_max", cfg.Relay.PauseMax, relay.EventsConfig{}.WithDefaults().PauseMax},
		{"consumer.early_wait", cfg.Consumer.EarlyWait, o.EarlyWait},
		{"rocketmq.request_timeout", cfg.RocketMQ.RequestTimeout, q.RequestTimeout},
		{"rocketmq.tls.enabled", cfg.RocketMQ.TLS.Enabled, !q.TLS.Disabled},
		{"rocketmq.topic", cfg.RocketMQ.Topic, r.Topic},
		{"relay.tick", cfg.Relay.Tick, r.Tick},
		{"relay.max_orders_per_message", cfg.Relay.MaxOrdersPerMessage, r.MaxOrdersPerMessage},
		{"relay.linger", cfg.Relay.Linger, r.Linger},
		{"relay.max_delay", cfg.Relay.MaxDelay, r.MaxDelay},
		{"relay.lease", cfg.Relay.Lease, r.Lease},
		{"relay.send_timeout", cfg.Relay.SendTimeout, r.SendTimeout},
		{"relay.claim_limit", cfg.Relay.ClaimLimit, r.ClaimLimit},
		{"relay.max_in_hand", cfg.Relay.MaxInHand, r.MaxInHand},
		{"relay.claimers", cfg.Relay.Claimers, r.Claimers},
		{"relay.senders", cfg.Relay.Senders, r.Senders},
		{"relay.markers", cfg.Relay.Markers, r.Markers},
		{"relay.poll", cfg.Relay.Poll, r.Poll},
		{"relay.backoff_min", cfg.Relay.BackoffMin, r.BackoffMin},
		{"relay.backoff_max", cfg.Relay.BackoffMax, r.BackoffMax},
		{"relay.pause_max", cfg.Relay.PauseMax, r.PauseMax},
		{"relay.purge_interval", cfg.Relay.PurgeInterval, r.PurgeInterval},
		{"relay.purge_batch", cfg.Relay.PurgeBatch, r.PurgeBatch},
		{"consumer.batch_orders", cfg.Consumer.BatchOrders, c.BatchOrders},
		{"consumer.batch_wait", cfg.Consumer.BatchWait, c.BatchWait},
		{"consumer.workers", cfg.Consumer.Workers, c.Workers},
		{"consumer.max_in_hand", cfg.Consumer.MaxInHand, c.MaxInHand},
		{"consumer.early_wait", cfg.Consumer.EarlyWait, c.EarlyWait},
		{"consumer.receivers", cfg.Consumer.Receivers, c.Receivers},
		{"consumer.max_messages", cfg.Consumer.MaxMessages, c.MaxMessages},
		{"consumer.invisible", cfg.Consumer.Invisible, c.Invisible},
		{"consumer.cancel_timeout", cfg.Consumer.CancelTimeout, c.CancelTimeout},
		{"consumer.ackers", cfg.Consumer.Ackers, c.Ackers},
		{"consumer.newer_version_delay", cfg.Consumer.NewerVersionDelay, c.NewerVersionDelay},
		{"consumer.backoff_min", cfg.Consumer.BackoffMin, c.BackoffMin},
		{"consumer.backoff_max", cfg.Consumer.BackoffMax, c.BackoffMax},
		{"consumer.give_up_after", cfg.Consumer.GiveUpAfter, c.GiveUpAfter},
		{"reconcile.schedule", cfg.Reconcile.Schedule, n.Schedule},
		{"reconcile.timezone", cfg.Reconcile.Timezone, n.Timezone},
		{"reconcile.grace", cfg.Reconcile.Grace, n.Grace},
		{"reconcile.max_lag", cfg.Reconcile.MaxLag, n.MaxLag},
		{"reconcile.on_lag", cfg.Reconcile.OnLag, n.OnLag},
		{"reconcile.page", cfg.Reconcile.Page, n.Page},
		{"reconcile.batch", cfg.Reconcile.Batch, n.Batch},
		{"reconcile.workers", cfg.Reconcile.Workers, n.Workers},
		{"reconcile.rate", cfg.Reconcile.Rate, n.Rate},
		{"reconcile.primary_rate", cfg.Reconcile.PrimaryRate, n.PrimaryRate},
		{"reconcile.max_lock_waits", cfg.Reconcile.MaxLockWaits, n.MaxLockWaits},
		{"reconcile.pause_lag", cfg.Reconcile.PauseLag, n.PauseLag},
		{"reconcile.lease", cfg.Reconcile.Lease, n.Lease},
		{"reconcile.cancel_timeout", cfg.Reconcile.CancelTimeout, n.CancelTimeout},
		{"reconcile.outbox_age", cfg.Reconcile.OutboxAge, n.OutboxAge},
		{"reconcile.retry_after", cfg.Reconcile.RetryAfter, n.RetryAfter},
		{"mysql.io_timeout", cfg.MySQL.IOTimeout, n.ReadTimeout},
		{"gateway.timeout", cfg.Gateway.Timeout, p.Timeout},
		{"gateway.concurrency", cfg.Gateway.Concurrency, p.Connections},
		{"gateway.breaker_failures", cfg.Gateway.BreakerFailures, p.BreakerFailures},
		{"gateway.breaker_pause", cfg.Gateway.BreakerPause, p.BreakerPause},
		{"gateway.decide_within", cfg.Gateway.DecideWithin, g.DecideWithin},
		{"gateway.concurrency", cfg.Gateway.Concurrency, g.Concurrency},
		{"gateway.hold_min", cfg.Gateway.HoldMin, g.HoldMin},
		{"gateway.hold_max", cfg.Gateway.HoldMax, g.HoldMax},
		{"gateway.give_up_after", cfg.Gateway.GiveUpAfter, g.GiveUpAfter},
		{"refund.batch", cfg.Refund.Batch, w.Batch},
		{"refund.lease", cfg.Refund.Lease, w.Lease},
		{"refund.poll", cfg.Refund.Poll, w.Poll},
		{"refund.backoff_min", cfg.Refund.BackoffMin, w.BackoffMin},
		{"refund.backoff_max", cfg.Refund.BackoffMax, w.BackoffMax},
		{"refund.max_attempts", cfg.Refund.MaxAttempts, w.MaxAttempts},
		{"shutdown.grace", cfg.Shutdown.Grace, c.ShutdownGrace},
		{"api.max_body", cfg.API.MaxBody, h.MaxBody},
		{"api.max_in_flight", cfg.API.MaxInFlight, h.MaxInFlight},
		{"api.request_timeout", cfg.API.RequestTimeout, h.RequestTimeout},
		{"api.read_timeout", cfg.API.ReadTimeout, h.ReadTimeout},
		{"api.idle_timeout", cfg.API.IdleTimeout, h.IdleTimeout},
		{"doctor.timeout", cfg.Doctor.Timeout, ops.DoctorConfig{}.WithDefaults().Timeout},
	} {
		if d.is != d.lib {
			t.Errorf("%s is %v in default.yaml, and %v in the library", d.key, d.is, d.lib)
		}
	}
}

// sample gives an allowed value of a key that is not its default.
func sample(t *testing.T, k key) (words string, value any) {
	t.Helper()
	switch {
	case k.name == "orders.max_lifetime": // not below orders.timeout
		return "240h", 240 * time.Hour
	case k.fileOf != "":
		path := filepath.Join(t.TempDir(), "secret")
		words, _ := sample(t, theKeys[k.fileOf])
		if err := os.WriteFile(path, []byte(words+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path, path
	case strings.HasPrefix(k.name, "mysql.dsn"):
		return "user:pw@tcp(db:3306)/shop", "user:pw@tcp(db:3306)/shop"
	case k.name == "rocketmq.endpoints":
		return "a:8081;b:8081", "a:8081;b:8081"
	case k.name == "rocketmq.admin_endpoint":
		return "broker:10911", "broker:10911"
	case strings.HasPrefix(k.name, "http."), k.name == "api.addr":
		return "127.0.0.1:7", "127.0.0.1:7"
	case k.name == "orders.policies":
		return "channel=Web timeout=never", "channel=Web timeout=never"
	case k.name == "api.tokens":
		return "shop place,read 0123456789abcdef", "shop place,read 0123456789abcdef"
	case k.name == "api.payment_secret", k.name == "gateway.secret":
		return "0123456789abcdef", "0123456789abcdef"
	case k.name == "gateway.url":
		return "https://shop/pay", "https://shop/pay"
	case k.name == "reconcile.schedule":
		return "0 4 * * MON", "0 4 * * MON"
	case k.name == "reconcile.timezone":
		return "Asia/Shanghai", "Asia/Shanghai"
	case len(k.oneOf) > 0:
		return k.oneOf[len(k.oneOf)-1], k.oneOf[len(k.oneOf)-1]
	}
	def := mustLoad(t, sources{}).values[k.name]
	switch k.kind {
	case kindBool:
		return strconv.FormatBool(!def.(bool)), !def.(bool)
	case kindInt:
		n := k.to
		if def == n {
			n = k.from
		}
		return strconv.FormatInt(n, 10), n
	case kindDuration:
		d := k.min
		if def == d {
			d = k.max
		}
		return d.String(), d
	}
	return "Some-Thing", "Some-Thing" // the case is kept
}

// partners are the keys that are refused without one another; several are separated by blanks.
var partners = map[string]string{
	"rocketmq.access_key": "rocketmq.secret_key", "rocketmq.secret_key": "rocketmq.access_key", "rocketmq.secret_key_file": "rocketmq.access_key",
	"rocketmq.tls.cert_file": "rocketmq.tls.key_file", "rocketmq.tls.key_file": "rocketmq.tls.cert_file",
	// Their smallest value is too small beside the other's default.
	"relay.backoff_max": "relay.backoff_min", "relay.lease": "relay.send_timeout", "retention.orders": "orders.key_retention",
	"consumer.backoff_max": "consumer.backoff_min", "consumer.invisible": "consumer.cancel_timeout",
	"gateway.hold_max": "gateway.hold_min", "refund.backoff_max": "refund.backoff_min", "refund.lease": "gateway.timeout", "gateway.timeout": "refund.lease",
	"gateway.url": "gateway.name gateway.secret",
}

func TestEveryKeyCanBeSetByFileEnvironmentAndSet(t *testing.T) {
	t.Parallel()
	for _, k := range keys {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			words, want := sample(t, k)
			given := map[string]string{k.name: words}
			for other := range strings.FieldsSeq(partners[k.name]) {
				given[other], _ = sample(t, theKeys[other])
			}
			file := writeYAML(t, given)
			var environ, set []string
			for name, words := range given {
				environ = append(environ, theKeys[name].env()+"="+words)
				set = append(set, name+"="+words)
			}
			from := map[string]sources{
				file + ":":               {file: file, named: "--config"},
				"environment " + k.env(): {environ: environ},
				"--set":                  {set: set},
			}
			if k.secret || strings.Contains(partners[k.name], "secret") {
				delete(from, "--set") // refused, see TestSecretsAreRefusedOnTheCommandLine
			}
			for origin, src := range from {
				cfg, err := load(src)
				if err != nil {
					t.Errorf("%s: %v", origin, err)
					continue
				}
				if got := cfg.values[k.name]; got != want {
					t.Errorf("%s: value is %v (%T), want %v (%T)", origin, got, got, want, want)
				}
				if got := fmt.Sprint(fieldOf(t, cfg.settings, k.name)); got != fmt.Sprint(want) {
					t.Errorf("%s: the field has %v, want %v", origin, got, want)
				}
				if got := cfg.origins[k.name]; !strings.HasPrefix(got, origin) {
					t.Errorf("origin is %q, want %q", got, origin)
				}
				if k.fileOf != "" {
					wantSecret, _ := sample(t, theKeys[k.fileOf])
					if got := cfg.values[k.fileOf]; got != wantSecret {
						t.Errorf("%s: %s is %v, want what is in the file", origin, k.fileOf, got)
					}
					given[k.fileOf] = ""
				}
				defaults := mustLoad(t, sources{})
				for _, other := range keys {
					if _, is := given[other.name]; !is && cfg.values[other.name] != defaults.values[other.name] {
						t.Errorf("%s: %s has changed too, to %v", origin, other.name, cfg.values[other.name])
					}
				}
			}
		})
	}
}

// Every value that a key does not allow is refused from every source, naming key, value, where it came from, and what is allowed.
func TestEveryKeyRefusesWhatIsNotAllowed(t *testing.T) {
	t.Parallel()
	type bad struct{ words, yaml string }
	for _, k := range keys {
		var list []bad
		switch {
		case k.kind == kindDuration:
			list = []bad{
				{"30", "30"}, {"0.5", "0.5"}, {"0", "0"}, {"0s", "0s"}, {"-1s", "-1s"}, {"soon", "soon"}, {"1d", "1d"}, {"true", "true"},
				{(k.max + time.Millisecond).String(), (k.max + time.Millisecond).String()},
				{(k.min - time.Microsecond).String(), (k.min - time.Microsecond).String()},
			}
		case k.kind == kindInt:
			list = []bad{
				{"many", "many"}, {"1.5", "1.5"}, {"1e3", "1e3"}, {"-1", "-1"}, {"0", "0"},
				{strconv.FormatInt(k.to+1, 10), strconv.FormatInt(k.to+1, 10)},
				{"", `"8"`}, {"99999999999999999999", "99999999999999999999"},
			}
		case k.kind == kindBool:
			list = []bad{{"yes", "yes"}, {"1", "1"}, {"TRUE ", ""}, {"", `"true"`}}
		case len(k.oneOf) > 0:
			list = []bad{{"loud", "loud"}, {"INFO", "INFO"}, {"7", "7"}}
		case strings.HasPrefix(k.name, "http."), k.name == "api.addr":
			list = []bad{{"9870", `"9870"`}, {"127.0.0.1:http", `"127.0.0.1:http"`}, {"127.0.0.1:70000", `"127.0.0.1:70000"`}}
		case k.name == "rocketmq.endpoints":
			list = []bad{{"broker", "broker"}, {"a:1;b", "a:1;b"}, {":8081", `":8081"`}, {"a:0", `"a:0"`}}
		case k.name == "rocketmq.admin_endpoint":
			list = []bad{{"broker", "broker"}, {"a:1;b:1", "a:1;b:1"}, {":10911", `":10911"`}}
		case k.name == "reconcile.schedule":
			list = []bad{{"02:30", `"02:30"`}, {"0 30 2 * * *", "0 30 2 * * *"}, {"61 2 * * *", "61 2 * * *"}, {"0 0 31 2 *", "0 0 31 2 *"}}
		case k.name == "reconcile.timezone":
			list = []bad{{"Mars/Olympus", "Mars/Olympus"}, {"local", "local"}}
		}
		if k.name == "orders.policies" {
			list = []bad{{"chanel=web timeout=5m", "chanel=web timeout=5m"}, {"timeout=30", "timeout=30"}}
		}
		if k.kind == kindText {
			list = append(list, bad{"", "12"}, bad{"", "true"})
		}
		list = append(list, bad{"", "null"}, bad{"", "[a, b]"})
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			for _, b := range list {
				from := map[string]sources{}
				if b.words != "" {
					from["environment "+k.env()] = sources{environ: []string{k.env() + "=" + b.words}}
					from["--set"] = sources{set: []string{k.name + "=" + b.words}}
				}
				if b.yaml != "" {
					path := k.name
					if k.kind == kindBool && b.yaml == "" {
						continue
					}
					file := writeFile(t, nested(path, b.yaml))
					from[file+":"+strconv.Itoa(strings.Count(path, ".")+1)] = sources{file: file, named: "--config"}
				}
				for origin, src := range from {
					_, err := load(src)
					var wrong *configError
					if !errors.As(err, &wrong) {
						t.Errorf("%q %s from %s: error is %v, want one of configuration", b.words, b.yaml, origin, err)
						continue
					}
					parts := []string{k.name, origin}
					if b.words != "" {
						parts = append(parts, strconv.Quote(b.words))
					}
					if k.kind != kindText {
						parts = append(parts, "allowed: "+k.allowed())
					}
					for _, part := range parts {
						if !strings.Contains(err.Error(), part) {
							t.Errorf("%q %s from %s: the error does not say %q: %v", b.words, b.yaml, origin, part, err)
						}
					}
				}
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		yaml    string
		environ []string
		set     []string
		want    []string
	}{
		// case CFG-1
		"a misspelt key is named":                      {yaml: "timeuot: 5m\n", want: []string{`"timeuot"`, ":1", "did you mean orders.timeout"}},
		"a misspelt key in a section":                  {yaml: "relay:\n  # a comment\n  max_dealy: 5m\n", want: []string{`"relay.max_dealy"`, ":3", "did you mean relay.max_delay"}},
		"a misspelt section":                           {yaml: "relais:\n  tick: 100ms\n", want: []string{`"relais"`, ":1"}},
		"a key under the wrong section":                {yaml: "consumer:\n  tick: 100ms\n", want: []string{`"consumer.tick"`}},
		"a key in another case":                        {yaml: "Relay:\n  tick: 100ms\n", want: []string{`"Relay"`}},
		"a key with dots":                              {yaml: "relay.tick: 100ms\n", want: []string{":1", "relay.tick is written with a dot", "tick under relay:"}},
		"a key given twice":                            {yaml: "log:\n  level: info\n  level: warn\n", want: []string{":3", "log.level is given twice", "line 2"}},
		"a section given twice":                        {yaml: "log:\n  level: info\nlog:\n  format: json\n", want: []string{":3", "log is given twice", "line 1"}},
		"a value for a section":                        {yaml: "log: info\n", want: []string{":1", "log is a section"}},
		"a list for a section":                         {yaml: "log: [info]\n", want: []string{":1", "log is a section"}},
		"a section for a value":                        {yaml: "relay:\n  tick:\n    every: 100ms\n", want: []string{"relay.tick", "must be a duration"}},
		"no sections at all":                           {yaml: "info\n", want: []string{":1", "expected sections"}},
		"a second document":                            {yaml: "log:\n  level: info\n---\nlog:\n  level: warn\n", want: []string{"second document"}},
		"no YAML":                                      {yaml: "log:\n\tlevel: info\n", want: []string{"line 2"}},
		"an unknown key in --set":                      {set: []string{"relay.lingr=1s"}, want: []string{"--set", `"relay.lingr"`, "did you mean relay.linger"}},
		"--set without a value":                        {set: []string{"relay.linger"}, want: []string{`--set "relay.linger"`, "key=value"}},
		"a deadline beyond the cap":                    {set: []string{"orders.timeout=200h"}, want: []string{"orders.timeout is 200h", "--set", "orders.max_lifetime, 168h"}},
		"an access key alone":                          {set: []string{"rocketmq.access_key=a"}, want: []string{"rocketmq.access_key", "rocketmq.secret_key is not", "both"}},
		"a secret key alone":                           {environ: []string{"LAPSE_ROCKETMQ_SECRET_KEY=s3cr3t"}, want: []string{"rocketmq.secret_key", "rocketmq.access_key is not", "both"}},
		"a certificate without a key":                  {set: []string{"rocketmq.tls.cert_file=a"}, want: []string{"rocketmq.tls.cert_file", "rocketmq.tls.key_file is not"}},
		"no topic":                                     {set: []string{"rocketmq.topic="}, want: []string{"rocketmq.topic is empty", "--set"}},
		"no group":                                     {set: []string{"rocketmq.group="}, want: []string{"rocketmq.group is empty"}},
		"a topic with a blank":                         {set: []string{"rocketmq.topic=a b"}, want: []string{"rocketmq.topic", `"a b"`, "blank"}},
		"profiles for the network":                     {set: []string{"http.pprof=0.0.0.0:6060"}, want: []string{"http.pprof", "0.0.0.0:6060", "loopback"}},
		"a token that can be guessed":                  {environ: []string{"LAPSE_API_TOKENS=shop place s3cr3t"}, want: []string{"api.tokens", "environment LAPSE_API_TOKENS", "entry 1 (shop)", "16 characters"}},
		"a token with an unknown scope":                {environ: []string{"LAPSE_API_TOKENS=a read 0123456789abcdef;b write 0123456789s3cr3t"}, want: []string{"api.tokens", "entry 2 (b)", "place, pay and read"}},
		"a secret that can be guessed":                 {environ: []string{"LAPSE_API_PAYMENT_SECRET=s3cr3t"}, want: []string{"api.payment_secret", "16 characters"}},
		"profiles for a name":                          {set: []string{"http.pprof=example.org:6060"}, want: []string{"http.pprof", "loopback"}},
		"a transaction as long as a message is hidden": {set: []string{"consumer.invisible=10s"}, want: []string{"consumer.cancel_timeout is 10s and", "consumer.invisible is 10s (from --set)", "shorter"}},
		"a send as long as its lease":                  {set: []string{"relay.lease=4s"}, want: []string{"relay.send_timeout is 5s", "relay.lease is 4s (from --set)", "half"}},
		"a claim that does not fit in hand":            {set: []string{"relay.max_in_hand=100"}, want: []string{"relay.claim_limit is 5000 and relay.max_in_hand is 100 (from --set)"}},
		"a least pause above the most":                 {set: []string{"consumer.backoff_min=6s", "relay.backoff_max=100ms"}, want: []string{"consumer.backoff_min is 6s (from --set) and consumer.backoff_max is 5s", "relay.backoff_min is 200ms and relay.backoff_max is 100ms"}},
		"a tick of half a millisecond":                 {set: []string{"relay.tick=1500us"}, want: []string{"relay.tick is 1.5ms", "whole milliseconds"}},
		"a DSN that is none":                           {environ: []string{"LAPSE_MYSQL_DSN=mysql://u:s3cr3t@db/shop"}, want: []string{"mysql.dsn", "environment LAPSE_MYSQL_DSN", "user:password@tcp(host:port)/database"}},
		"a DSN without database":                       {environ: []string{"LAPSE_MYSQL_DSN_RELAY=u:s3cr3t@tcp(db:1)/"}, want: []string{"mysql.dsn_relay", "names no database for db:1"}},
		"a secret and its file":                        {environ: []string{"LAPSE_MYSQL_DSN=u:s3cr3t@tcp(db:1)/d", "LAPSE_MYSQL_DSN_FILE=/s"}, want: []string{"mysql.dsn (from environment LAPSE_MYSQL_DSN)", "mysql.dsn_file (from environment LAPSE_MYSQL_DSN_FILE)", "keep one"}},
		"a secret's file that is not there":            {environ: []string{"LAPSE_MYSQL_DSN_FILE=/not/there"}, want: []string{"mysql.dsn_file", "/not/there", "cannot be read", "no such file"}},
		"a secret's file that is empty":                {environ: []string{"LAPSE_MYSQL_DSN_FILE=/dev/null"}, want: []string{"mysql.dsn_file", "/dev/null", "is empty"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src := sources{environ: tc.environ, set: tc.set}
			if tc.yaml != "" {
				src.file, src.named = writeFile(t, tc.yaml), "--config"
			}
			_, err := load(src)
			var wrong *configError
			if !errors.As(err, &wrong) {
				t.Fatalf("error is %v, want one of configuration", err)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error does not say %q:\n%v", part, err)
				}
			}
			if strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("the error shows a secret:\n%v", err)
			}
		})
	}
}

func TestSecretsAreRefusedOnTheCommandLine(t *testing.T) {
	t.Parallel()
	for _, k := range keys {
		if !k.secret {
			continue
		}
		_, err := load(sources{set: []string{k.name + "=u:s3cr3t@tcp(db:1)/d"}})
		if err == nil || !strings.Contains(err.Error(), k.env()+"_FILE") || strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("--set %s: error is %v; want one that names %s_FILE and not the secret", k.name, err, k.env())
		}
		for flag, name := range keysOfFlags {
			if name == k.name {
				t.Errorf("the flag --%s takes the secret %s", flag, name)
			}
		}
	}
}

func TestAllProblemsAreToldAtOnce(t *testing.T) {
	t.Parallel()
	_, err := load(sources{
		file: writeFile(t, "relay:\n  tick: 5\nnonsense: 1\n"), named: "--config",
		environ: []string{"LAPSE_RELAY_POLL=-1s"}, set: []string{"relay.senders=0"},
	})
	if err == nil {
		t.Fatal("nothing was refused")
	}
	for _, part := range []string{"4 problems", "relay.tick", "nonsense", "relay.poll", "relay.senders"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q:\n%v", part, err)
		}
	}
}

func TestTheLaterSourceWins(t *testing.T) {
	t.Parallel()
	src := sources{}
	steps := []struct {
		add    func()
		want   string
		origin string
	}{
		{func() {}, "info", ""},
		{func() { src.file, src.named = writeFile(t, "log:\n  level: debug\n"), "--config" }, "debug", "FILE:2"},
		{func() { src.environ = []string{"LAPSE_LOG_LEVEL=warn"} }, "warn", "environment LAPSE_LOG_LEVEL"},
		{func() { src.flags = []assignment{{"log.level", "error", "--log-level"}} }, "error", "--log-level"},
		{func() { src.set = []string{"log.level=info", "log.level=debug"} }, "debug", "--set"},
	}
	for _, step := range steps {
		step.add()
		cfg := mustLoad(t, src)
		origin := strings.Replace(cfg.origins["log.level"], src.file+":", "FILE:", 1)
		if src.file == "" {
			origin = cfg.origins["log.level"]
		}
		if cfg.Log.Level != step.want || origin != step.origin {
			t.Errorf("log.level is %q from %q, want %q from %q", cfg.Log.Level, origin, step.want, step.origin)
		}
	}
}

func TestAnEmptyVariableCountsAsNotSet(t *testing.T) {
	t.Parallel()
	cfg := mustLoad(t, sources{environ: []string{"LAPSE_RELAY_TICK=", "LAPSE_NO_KEY="}})
	if cfg.Relay.Tick != 100*time.Millisecond || len(cfg.warnings) != 0 {
		t.Errorf("relay.tick is %s, warnings are %q", cfg.Relay.Tick, cfg.warnings)
	}
}

func TestAnUnknownVariableIsWarnedOfByNameWithTheNearestKey(t *testing.T) {
	t.Parallel()
	cfg := mustLoad(t, sources{environ: []string{
		"LAPSE_RELAY_TIK=1s", "LAPSE_TEST_MYSQL_ADMIN_DSN=x", "LAPSE_STACK_PORT=1", "LAPSE_CONFIG=y", "LAPSED=1", "PATH=/bin", "LAPSE_PORT=tcp://10.0.0.1:80",
	}})
	want := []string{
		"the environment variable LAPSE_RELAY_TIK is no setting of lapse; did you mean LAPSE_RELAY_TICK?",
		"the environment variable LAPSE_PORT is no setting of lapse",
	}
	if len(cfg.warnings) != 2 || cfg.warnings[0] != want[0] || !strings.HasPrefix(cfg.warnings[1], want[1]) {
		t.Errorf("warnings are %q, want %q", cfg.warnings, want)
	}
}

func TestASecretComesFromTheStrongerOfItsTwoSources(t *testing.T) {
	t.Parallel()
	inFile := writeFile(t, "u:file@tcp(db:1)/d\r\n")
	named := writeFile(t, "mysql:\n  dsn: u:yaml@tcp(db:1)/d\n")
	namedFile := writeFile(t, "mysql:\n  dsn_file: "+inFile+"\n")
	for name, tc := range map[string]struct {
		src  sources
		want string
	}{
		"file in the environment over value in YAML": {sources{file: named, environ: []string{"LAPSE_MYSQL_DSN_FILE=" + inFile}}, "u:file@tcp(db:1)/d"},
		"value in the environment over file in YAML": {sources{file: namedFile, environ: []string{"LAPSE_MYSQL_DSN=u:env@tcp(db:1)/d"}}, "u:env@tcp(db:1)/d"},
		"file in YAML":  {sources{file: namedFile}, "u:file@tcp(db:1)/d"},
		"value in YAML": {sources{file: named}, "u:yaml@tcp(db:1)/d"},
		"file by --set": {sources{file: named, set: []string{"mysql.dsn_file=" + inFile}}, "u:file@tcp(db:1)/d"},
	} {
		if cfg := mustLoad(t, tc.src); cfg.MySQL.DSN != tc.want {
			t.Errorf("%s: mysql.dsn is %q, want %q", name, cfg.MySQL.DSN, tc.want)
		}
	}
}

func TestARoleHasItsOwnDSNOrTheCommonOne(t *testing.T) {
	t.Parallel()
	const common, own = "u:p@tcp(db:1)/common", "u:p@tcp(db:1)/own"
	cfg := mustLoad(t, sources{environ: []string{"LAPSE_MYSQL_DSN=" + common, "LAPSE_MYSQL_DSN_RELAY=" + own}})
	for r, want := range map[role]string{roleAPI: common, roleMigrate: common, roleRelay: own, roleRefund: common, roleConsume: common, roleReconcile: common} {
		if got, err := cfg.dsn(r); got != want || err != nil {
			t.Errorf("role %s: %q, %v; want %q", r, got, err, want)
		}
	}
	if _, err := mustLoad(t, sources{}).dsn(roleConsume); err == nil || !strings.Contains(err.Error(), "LAPSE_MYSQL_DSN_CONSUME") {
		t.Errorf("without any: error is %v, want one that names the variables", err)
	}
}

func TestFilesThatSayNothingAreNoMistake(t *testing.T) {
	t.Parallel()
	for _, content := range []string{"", "# only words\n", "---\n", "\ufeffrelay:\n  tick: 100ms\n", "relay:\n  # tick: 100ms\n", "null\n"} {
		cfg, err := load(sources{file: writeFile(t, content), named: "--config"})
		if err != nil {
			t.Errorf("%q: %v", content, err)
		} else if cfg.Relay.Tick != 100*time.Millisecond {
			t.Errorf("%q: relay.tick is %s", content, cfg.Relay.Tick)
		}
	}
}

// case CFG-3: a ConfigMap that is swapped under a running process is not read again; the place that explains the configuration says so.
func TestTheDocumentationSaysThatARestartIsNeeded(t *testing.T) {
	t.Parallel()
	if s := string(configs.Default); !strings.Contains(s, "Nothing is reloaded while a process runs") || !strings.Contains(s, "restart the processes") {
		t.Error("default.yaml does not say that a change needs a restart")
	}
}

// Every setting of the libraries has a key, and reaches the field of its name: all keys are set to values of their own.
func TestEveryKeyReachesTheLibrary(t *testing.T) {
	t.Parallel()
	var set []string
	want := map[string]any{}
	for i, k := range keys {
		section, _, _ := strings.Cut(k.name, ".")
		if k.secret || k.fileOf != "" || section == "http" || section == "log" || k.kind == kindText {
			continue
		}
		words, value := sample(t, k)
		switch k.kind {
		case kindInt:
			value = k.from + (int64(i) % (k.to - k.from + 1))
			words = fmt.Sprint(value)
		case kindDuration:
			value = k.min + time.Duration(i)*time.Millisecond
			words = fmt.Sprint(value)
		}
		if k.name == "orders.max_lifetime" {
			value, words = 240*time.Hour, "240h"
		}
		set, want[k.name] = append(set, k.name+"="+words), value
	}
	set = append(set, "orders.policies=method=cash timeout=never")
	for _, name := range []string{"events.topic", "events.source", "rocketmq.topic", "rocketmq.namespace", "rocketmq.tls.ca_file", "rocketmq.tls.server_name", "rocketmq.tls.cert_file", "rocketmq.tls.key_file", "rocketmq.access_key"} {
		set, want[name] = append(set, name+"="+name), name
	}
	for _, name := range []string{"reconcile.schedule", "reconcile.timezone", "reconcile.on_lag"} {
		words, value := sample(t, theKeys[name])
		set, want[name] = append(set, name+"="+words), value
	}
	for name, value := range map[string]any{"gateway.url": "https://shop/pay", "gateway.name": "bank"} {
		set, want[name] = append(set, fmt.Sprintf("%s=%s", name, value)), value
	}
	want["gateway.secret"], want["orders.close_on_cancel"] = "0123456789abcdef", true // the second is said by the URL
	cfg := mustLoad(t, sources{set: append(set, "rocketmq.endpoints=b:1"), environ: []string{"LAPSE_GATEWAY_SECRET=0123456789abcdef", "LAPSE_ROCKETMQ_SECRET_KEY=s", "LAPSE_ROCKETMQ_SECURITY_TOKEN=t",
		"LAPSE_API_TOKENS=shop place,read 0123456789abcdef", "LAPSE_API_PAYMENT_SECRET=0123456789abcdef"}})
	s := &service{cfg: cfg}
	want["rocketmq.endpoints"], want["rocketmq.secret_key"], want["rocketmq.security_token"] = "b:1", "s", "t"
	want["rocketmq.tls.enabled"] = !want["rocketmq.tls.enabled"].(bool) // the field says disabled

	moved := map[string]string{ // fields whose key is not section.field_name
		"orders.retention.orders": "retention.orders", "orders.retention.events": "retention.events",
		"orders.retention.parked": "retention.parked", "orders.retention.runs": "retention.runs",
		"events.lease": "relay.lease", "events.send_timeout": "relay.send_timeout", "events.senders": "relay.senders", "events.poll": "relay.poll",
		"events.backoff_min": "relay.backoff_min", "events.backoff_max": "relay.backoff_max", "events.pause_max": "relay.pause_max",
		"relay.topic": "rocketmq.topic", "orders.early_wait": "consumer.early_wait", "orders.outbox_retention": "outbox.retention",
		"orders.max_open_conns": "mysql.max_open_conns", "orders.dial_timeout": "mysql.dial_timeout", "orders.io_timeout": "mysql.io_timeout",
		"gateway.connections": "gateway.concurrency", "rocketmq.tls.disabled": "rocketmq.tls.enabled", "reconcile.read_timeout": "mysql.io_timeout",
	}
	without := map[string]string{ // fields without a key
		"relay.stop_timeout": "part of shutdown.grace", "consumer.shutdown_grace": "part of shutdown.grace",
		"rocketmq.topic_type": "timed messages need DELAY", "refund.name": "that of the gateway", "refund.stop_timeout": "part of shutdown.grace",
		"orders.policies": "compared below", "orders.events": "compared below",
		"events.claim_limit": "a claim is sent as a whole before the next", "events.stop_timeout": "part of shutdown.grace",
		"api.stop_timeout": "part of shutdown.grace", "api.tokens": "compared below", "api.payment_secrets": "compared below",
		"api.now": "of the tests",
	}
	var walk func(section string, v reflect.Value)
	walk = func(section string, v reflect.Value) {
		for i := range v.NumField() {
			f := v.Type().Field(i)
			name := section + "." + snake(f.Name)
			switch {
			case f.Name == "Logger" || f.Name == "Registerer" || without[name] != "":
			case f.Type.Kind() == reflect.Struct:
				walk(name, v.Field(i))
			default:
				if to, is := moved[name]; is {
					name = to
				}
				if expected, known := want[name]; !known || fmt.Sprint(v.Field(i).Interface()) != fmt.Sprint(expected) {
					t.Errorf("%s.%s is %v; the key %s says %v", v.Type(), f.Name, v.Field(i).Interface(), name, expected)
				}
			}
		}
	}
	walk("relay", reflect.ValueOf(s.relayConfig()))
	walk("consumer", reflect.ValueOf(s.consumerConfig()))
	walk("orders", reflect.ValueOf(cfg.ordersConfig()))
	walk("gateway", reflect.ValueOf(s.gatewayConfig()))
	walk("gateway", reflect.ValueOf(s.gateConfig()))
	walk("refund", reflect.ValueOf(s.refundConfig()))
	walk("events", reflect.ValueOf(s.eventsConfig()))
	if o := cfg.ordersConfig(); !o.Events || !slices.Equal(o.Policies, []orders.Policy{{PaymentMethod: "cash", Never: true}}) {
		t.Errorf("the store gets the policies %v and events %t", o.Policies, o.Events)
	}
	if o := mustLoad(t, sources{}).ordersConfig(); o.Events || len(o.Policies) != 0 {
		t.Errorf("without a word the store gets the policies %v and events %t", o.Policies, o.Events)
	}
	walk("rocketmq", reflect.ValueOf(s.rocketmq()))
	walk("reconcile", reflect.ValueOf(s.reconcileConfig()))
	ofAPI, err := s.apiConfig()
	if err != nil {
		t.Fatal(err)
	}
	walk("api", reflect.ValueOf(ofAPI))
	if len(ofAPI.Tokens) != 1 || ofAPI.Tokens[0].Name != "shop" || !slices.Equal(ofAPI.PaymentSecrets, []string{"0123456789abcdef"}) {
		t.Errorf("the API gets the tokens %v and the secrets %v", ofAPI.Tokens, ofAPI.PaymentSecrets)
	}
	if drain := s.relayConfig().StopTimeout; drain <= 0 || drain >= cfg.Shutdown.Grace || drain != s.consumerConfig().ShutdownGrace || drain != ofAPI.StopTimeout {
		t.Errorf("the loops get %s and %s of a grace of %s; want one part of it", drain, s.consumerConfig().ShutdownGrace, cfg.Shutdown.Grace)
	}
}

// What the check takes starts: every key is tried with its smallest and its greatest value.
func TestWhatTheCheckTakesTheLibrariesTake(t *testing.T) {
	t.Parallel()
	store, err := orders.Open("u:p@tcp(127.0.0.1:1)/d", orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	for _, k := range keys {
		var ends []string
		switch k.kind {
		case kindInt:
			ends = []string{fmt.Sprint(k.from), fmt.Sprint(k.to)}
		case kindDuration:
			ends = []string{k.min.String(), k.max.String()}
		}
		for _, words := range ends {
			cfg, err := load(sources{set: []string{k.name + "=" + words}})
			if err != nil {
				continue // refused beside the other defaults
			}
			s := &service{cfg: cfg, reg: prometheus.NewRegistry()}
			consuming := s.consumerConfig()
			consuming.EarlyWait = 0 // the store's own
			_, consumerErr := consumer.New(store, store, neverReady{}, consuming)
			_, relayErr := relay.New(store, neverReady{}, s.relayConfig())
			s.cfg.Gateway.URL, s.cfg.Gateway.Name, s.cfg.Gateway.Secret = "http://shop/pay", "bank", "0123456789abcdef"
			gateway, gatewayErr := payments.NewHTTP(s.gatewayConfig())
			_, gateErr := payments.NewGate(store, gateway, s.gateConfig())
			_, workerErr := payments.NewWorker(store, gateway, s.refundConfig())
			if err := errors.Join(gatewayErr, gateErr, workerErr); err != nil {
				t.Errorf("%s=%s passes the check, and then: %v", k.name, words, err)
			}
			_, reconcileErr := reconcile.New(store, store, store.DB(), s.reconcileConfig())
			for _, err := range []error{consumerErr, relayErr, reconcileErr} {
				if err != nil {
					t.Errorf("%s=%s passes the check, and then: %v", k.name, words, err)
				}
			}
		}
	}
}

// neverReady is a broker that nobody asks.
type neverReady struct {
	consumer.Source
	relay.Sender
}

// Ready says that it is not.
func (neverReady) Ready() error { return rmq.ErrNotReady }

// snake is max_in_hand for MaxInHand, and io_timeout for IOTimeout.
func snake(field string) string {
	s := regexp.MustCompile(`([a-z])([A-Z])`).ReplaceAllString(field, "${1}_$2")
	return strings.ToLower(regexp.MustCompile(`([A-Z])([A-Z][a-z])`).ReplaceAllString(s, "${1}_$2"))
}

func TestTheDocumentationNamesTheDefaultAddresses(t *testing.T) {
	t.Parallel()
	for service, addr := range defaultAddr {
		if !strings.Contains(string(configs.Default), addr) {
			t.Errorf("default.yaml does not say that %s serves at %s", service, addr)
		}
	}
	taken := map[string]string{mustLoad(t, sources{}).API.Addr: "the API itself"}
	for service, addr := range defaultAddr {
		if other, is := taken[addr]; is {
			t.Errorf("%s and %s cannot run on one host: they serve at the same address, %s", service, other, addr)
		}
		taken[addr] = service
	}
}

func TestSecretsAreMaskedWhereverConfigurationIsPrinted(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                       "",
		"lapse:hunter2@tcp(db:3306)/shop":        "lapse:***@tcp(db:3306)/shop",
		"lapse:h:u/n@ter2@tcp(db:3306)/shop?a=b": "lapse:***@tcp(db:3306)/shop",
		"lapse@unix(/run/mysqld.sock)/shop":      "lapse:***@unix(/run/mysqld.sock)/shop",
		"AKIAhunter2":                            "***",
		"hunter2/":                               "***",
	} {
		if got := mask(in); got != want {
			t.Errorf("mask(%q) is %q, want %q", in, got, want)
		}
	}
	// A token that looks like a DSN is no DSN.
	var shown output
	cfg := mustLoad(t, sources{environ: []string{"LAPSE_API_TOKENS=shop read s3cr3t:x@tcp(s3cr3t)/s3cr3t", "LAPSE_API_PAYMENT_SECRET=s3cr3t:x@tcp(s3cr3t)/s3cr3t"}})
	if err := cfg.print(&shown); err != nil {
		t.Fatal(err)
	}
	if got := shown.String(); strings.Contains(got, "s3cr3t") || !strings.Contains(got, "payment_secret: '***'") || !strings.Contains(got, "tokens: '***'") {
		t.Errorf("the secrets of the API are printed as\n%s", got)
	}
	for in, want := range map[string]string{
		"":             "",
		"AKIAhunter2/": "***",
	} {
		if got := mask(in); got != want {
			t.Errorf("mask(%q) is %q, want %q", in, got, want)
		}
	}
}

func mustLoad(t *testing.T, src sources) *effective {
	t.Helper()
	cfg, err := load(src)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lapse.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// nested writes one key as YAML, each section in a line of its own.
func nested(name, value string) string {
	var b strings.Builder
	path := strings.Split(name, ".")
	for depth, part := range path[:len(path)-1] {
		fmt.Fprintf(&b, "%s%s:\n", strings.Repeat("  ", depth), part)
	}
	fmt.Fprintf(&b, "%s%s: %s\n", strings.Repeat("  ", len(path)-1), path[len(path)-1], value)
	return b.String()
}

// writeYAML writes keys of one section as a file.
func writeYAML(t *testing.T, given map[string]string) string {
	t.Helper()
	tree := map[string]any{}
	for name, words := range given {
		at := tree
		path := strings.Split(name, ".")
		for _, part := range path[:len(path)-1] {
			if at[part] == nil {
				at[part] = map[string]any{}
			}
			at = at[part].(map[string]any)
		}
		switch theKeys[name].kind {
		case kindInt, kindBool:
			at[path[len(path)-1]] = &yaml.Node{Kind: yaml.ScalarNode, Value: words}
		default:
			at[path[len(path)-1]] = words
		}
	}
	out, err := yaml.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, string(out))
}

func fieldOf(t *testing.T, s settings, name string) any {
	t.Helper()
	v := reflect.ValueOf(s)
	for part := range strings.SplitSeq(name, ".") {
		found := false
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("mapstructure") == part {
				v, found = v.Field(i), true
				break
			}
		}
		if !found {
			t.Fatalf("settings has no field for %s", name)
		}
	}
	return v.Interface()
}
