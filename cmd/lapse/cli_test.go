package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/configs"
	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

func TestExitCodesAndWhatIsSaid(t *testing.T) {
	t.Parallel()
	closed := closedAddr(t)
	unreachable := "LAPSE_MYSQL_DSN=u:s3cr3t@tcp(" + closed + ")/shop"
	yaml := writeFile(t, "timeuot: 5m\n")
	for _, tc := range []struct {
		name    string
		environ []string
		args    []string
		code    int
		says    string
	}{
		{"nothing", nil, nil, 2, "no command given"},
		{"an unknown command", nil, []string{"relai"}, 2, `there is no command "relai"; did you mean "relay"?`},
		{"an unknown subcommand", nil, []string{"migrate", "pu"}, 2, `there is no command "migrate pu"; did you mean "up"?`},
		{"a command group alone", nil, []string{"migrate"}, 2, "say which"},
		{"an unknown flag", nil, []string{"consume", "--gruop", "x"}, 2, "unknown flag: --gruop\nTry 'lapse consume --help'."},
		{"an argument too many", nil, []string{"relay", "now"}, 2, `unexpected argument "now"`},
		{"no order", nil, []string{"cancel", "--reason", "x"}, 2, "ORDER is missing"},
		{"no reason", nil, []string{"cancel", "12"}, 2, "--reason"},
		{"no order id", nil, []string{"cancel", "012", "--reason", "x"}, 2, `order id "012"`},
		{"no database", nil, []string{"cancel", "12", "--reason", "x"}, 2, "LAPSE_MYSQL_DSN"},
		{"no database for relay", nil, []string{"relay"}, 2, "LAPSE_MYSQL_DSN_RELAY"},
		{"down without a version", []string{unreachable}, []string{"migrate", "down", "--yes"}, 2, "--to VERSION"},
		{"down without consent", []string{unreachable}, []string{"migrate", "down", "--to", "3"}, 2, "--yes"},
		{"down to nowhere", []string{unreachable}, []string{"migrate", "down", "--to", "99", "--yes"}, 2, "--to 99"},
		{"health of what", nil, []string{"health"}, 2, "lapse health relay"},
		{"health of nothing known", nil, []string{"health", "shop"}, 2, `health of "shop"`},
		{"a wrong value", nil, []string{"config", "--set", "relay.tick=0s"}, 2, "relay.tick"},
		{"a wrong value in a flag", nil, []string{"relay", "--shutdown-grace", "20"}, 2, `shutdown.grace: "20" (from --shutdown-grace) is a number without a unit`},
		{"a misspelt key", nil, []string{"relay", "--config", yaml}, 2, `"timeuot"`}, // case CFG-1
		// case CFG-5
		{"a named file that is missing", nil, []string{"config", "--config", "/not/there.yaml"}, 2, "read the file that --config names: open /not/there.yaml"},
		{"a file named by the environment that is missing", []string{"LAPSE_CONFIG=/not/there.yaml"}, []string{"config"}, 2, "read the file that LAPSE_CONFIG names"},
		{"no file named", nil, []string{"config"}, 0, ""},
		{"an empty name of a file", nil, []string{"config", "--config", ""}, 2, "--config names no file"},
		{"settings that are refused together", []string{unreachable}, []string{"relay", "--set", "relay.lease=5s", "--http-addr", "127.0.0.1:0"}, 2, "relay.lease is 5s (from --set)"},
		{"the same where nothing is started", nil, []string{"config", "--set", "consumer.invisible=10s"}, 2, "consumer.cancel_timeout is 10s"},
		{"an API for a network without tokens", []string{unreachable}, []string{"api", "--api-addr", "0.0.0.0:0", "--http-addr", "127.0.0.1:0"}, 2, "api.addr is 0.0.0.0:0 (from --api-addr): "},
		{"the same in one process with the others", []string{unreachable}, []string{"all", "--api-addr", ":0", "--http-addr", "127.0.0.1:0"}, 2, "LAPSE_API_TOKENS"},
		{"an API for a name without tokens", []string{unreachable, "LAPSE_API_ADDR=shop.example:1"}, []string{"api", "--http-addr", "127.0.0.1:0"}, 2, "environment LAPSE_API_ADDR"},
		{"a certificate that is not there", []string{unreachable}, []string{"consume", "--set", "rocketmq.tls.ca_file=/not/there.pem", "--http-addr", "127.0.0.1:0"}, 2, "/not/there.pem"},
		{"a time zone that is none", []string{"TZ=Mars/Olympus"}, []string{"version"}, 2, `TZ is "Mars/Olympus"`}, // case JOB-7
		{"a database that is not there", []string{unreachable}, []string{"cancel", "12", "--reason", "x"}, 3, closed},
		{"a database that is not there, for migrate", []string{unreachable}, []string{"migrate", "up"}, 3, closed},
		{"a service that is not there", nil, []string{"health", "--http-addr", closed}, 3, "nothing answers"},
		{"version", nil, []string{"version"}, 0, ""},
		{"version as a flag", nil, []string{"--version"}, 0, ""},
		{"help", nil, []string{"help", "migrate", "up"}, 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			code, _, stderr := lapse(t, tc.environ, tc.args...)
			if code != tc.code {
				t.Errorf("exit code is %d, want %d", code, tc.code)
			}
			if !strings.Contains(stderr, tc.says) || tc.code == 0 && stderr != "" {
				t.Errorf("stderr is %q, want %q in it", stderr, tc.says)
			}
			if strings.Contains(stderr, "s3cr3t") {
				t.Errorf("stderr shows a password: %q", stderr)
			}
		})
	}
}

func TestTheExitCodeOfABrokenInvariantIsItsOwn(t *testing.T) {
	t.Parallel()
	a := &app{stderr: new(output), begun: true}
	if code := a.exit(t.Context(), fmt.Errorf("demo: %w", codeError{errors.New("I1 is broken"), exitInvariant})); code != 4 {
		t.Errorf("exit code is %d, want 4", code)
	}
}

func TestAnInterruptedCommandFailsAndSaysSo(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var errOut output
	code := run(ctx, []string{"migrate", "up"}, []string{"LAPSE_MYSQL_DSN=u:p@tcp(" + closedAddr(t) + ")/shop"}, new(output), &errOut)
	if code != 1 || !strings.Contains(errOut.String(), "interrupted") {
		t.Errorf("exit code is %d, stderr %q; want 1 and a word of the interruption", code, errOut.String())
	}
}

func TestEveryCommandTeaches(t *testing.T) {
	t.Parallel()
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Name() == "help" || cmd.Name() == "completion" {
			return
		}
		path := strings.Fields(cmd.CommandPath())
		code, help, stderr := lapse(t, nil, append(path[1:], "--help")...)
		if code != 0 || stderr != "" {
			t.Errorf("%s --help: exit code %d, stderr %q", cmd.CommandPath(), code, stderr)
		}
		for _, part := range []string{"Examples:\n  ", "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 a dependency is not there,\n4 an invariant is broken", "LAPSE_RELAY_MAX_DELAY", "--config file", "--set key=value", cmd.Long} {
			if part == "" || !strings.Contains(help, part) {
				t.Errorf("%s --help does not say %q", cmd.CommandPath(), part)
			}
		}
		if !strings.Contains(cmd.Example, cmd.CommandPath()) || cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: its example is %q, its line in the list %q", cmd.CommandPath(), cmd.Example, cmd.Short)
		}
		for line := range strings.Lines(cmd.Long) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > 120 {
				t.Errorf("%s: a line of its help has %d characters: %s", cmd.CommandPath(), n, line)
			}
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	a := &app{stdout: new(output), stderr: new(output)}
	visit(a.root())
}

// Examples that are wrong teach wrong things: every flag in them has to exist, and every command.
func TestTheExamplesOfTheHelpCanBeParsed(t *testing.T) {
	t.Parallel()
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		for line := range strings.Lines(cmd.Example) {
			line, _, _ = strings.Cut(line, "#")
			line, _, _ = strings.Cut(line, ">")
			fields := strings.Fields(line)
			if len(fields) == 0 || fields[0] != "lapse" {
				continue
			}
			a := &app{stdout: new(output), stderr: new(output)}
			root := a.root()
			found, rest, err := root.Find(fields[1:])
			if err != nil || found == root {
				t.Errorf("%q: %v", line, err)
				continue
			}
			var flags []string
			for _, f := range rest {
				if name, isFlag := strings.CutPrefix(f, "--"); isFlag {
					name, _, _ = strings.Cut(name, "=")
					flags = append(flags, name)
				}
			}
			for _, name := range flags {
				if found.Flags().Lookup(name) == nil && found.InheritedFlags().Lookup(name) == nil {
					t.Errorf("%q: %s has no flag --%s", line, found.CommandPath(), name)
				}
			}
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit((&app{stdout: new(output), stderr: new(output)}).root())
}

func TestEveryFlagOfAKeySetsIt(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	a := &app{stdout: new(output), stderr: new(output)}
	for _, cmd := range append(a.root().Commands(), a.root()) {
		for flag, name := range keysOfFlags {
			f := cmd.LocalFlags().Lookup(flag)
			if f == nil {
				continue
			}
			used[flag] = true
			if !strings.Contains(f.Usage, "(key "+name+")") {
				t.Errorf("--%s of %s does not name its key %s: %q", flag, cmd.Name(), name, f.Usage)
			}
			if f.DefValue != "" {
				t.Errorf("--%s of %s has a default of its own, %q; it lives in default.yaml", flag, cmd.Name(), f.DefValue)
			}
		}
	}
	for flag, name := range keysOfFlags {
		if !used[flag] {
			t.Errorf("no command has the flag --%s of the key %s", flag, name)
		}
		if _, known := theKeys[name]; !known {
			t.Errorf("the flag --%s sets %s, which is no key", flag, name)
		}
	}
	words, want := sample(t, theKeys["log.format"])
	code, stdout, stderr := lapse(t, nil, "config", "--log-format", words)
	if code != 0 || !strings.Contains(stdout, fmt.Sprintf("  format: %v  # from --log-format\n", want)) {
		t.Errorf("exit code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
}

func TestConfigPrintsWhatIsInEffect(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	file := filepath.Join(dir, "lapse.yaml")
	for path, content := range map[string]string{
		secret: "hunter2\n",
		file:   "relay:\n  tick: 1s\nrocketmq:\n  access_key: lapse\n  secret_key_file: " + secret + "\n",
	} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, stderr := lapse(t,
		[]string{"LAPSE_MYSQL_DSN=lapse:hunter2@tcp(db:3306)/shop?tls=true", "LAPSE_CONSUMER_INVISIBLE=90s", "LAPSE_ROCKETMQ_TLS_SERVER_NAME=yes"},
		"config", "--config", file, "--log-level", "debug", "--set", "http.addr=:9870")
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d, stderr %q", code, stderr)
	}
	golden, err := os.ReadFile("testdata/config.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.ReplaceAll(stdout, dir, "DIR"); got != string(golden) {
		if os.Getenv("LAPSE_TEST_UPDATE_GOLDEN") == "1" {
			if err := os.WriteFile("testdata/config.golden.yaml", []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		t.Errorf("config prints\n%s\nwant testdata/config.golden.yaml (LAPSE_TEST_UPDATE_GOLDEN=1 rewrites it)", got)
	}
	if strings.Contains(stdout, "hunter2") {
		t.Error("it shows a secret")
	}
}

// What config prints is a configuration: with the secrets filled in it is read again as the same one.
func TestConfigPrintsAConfiguration(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := lapse(t, nil, "config", "--set", "relay.tick=1s", "--set", "rocketmq.topic=on")
	if code != 0 {
		t.Fatalf("exit code %d, stderr %q", code, stderr)
	}
	again, err := load(sources{file: writeFile(t, stdout), named: "--config"})
	if err != nil {
		t.Fatal(err)
	}
	if again.Relay.Tick != time.Second || again.RocketMQ.Topic != "on" {
		t.Errorf("read again: relay.tick is %s, rocketmq.topic is %q", again.Relay.Tick, again.RocketMQ.Topic)
	}
	code, stdout, stderr = lapse(t, nil, "config", "--defaults")
	if code != 0 || stderr != "" || stdout != string(configs.Default) {
		t.Errorf("--defaults: exit code %d, stderr %q, and %d bytes, want default.yaml", code, stderr, len(stdout))
	}
}

func TestConfigWarnsOfVariablesThatAreNoKeys(t *testing.T) {
	t.Parallel()
	code, _, stderr := lapse(t, []string{"LAPSE_RELAY_TIK=1s"}, "config")
	if code != 0 || !strings.Contains(stderr, "LAPSE_RELAY_TIK is no setting of lapse; did you mean LAPSE_RELAY_TICK?") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
}

func TestVersionNamesBinarySchemaAndMessages(t *testing.T) {
	t.Parallel()
	_, stdout, _ := lapse(t, nil, "version")
	for _, part := range []string{"lapse " + readBuild().Version + "\n", fmt.Sprintf("schema %d, messages %d\n", migrations.Version, orders.ExpiryVersion), "go1."} {
		if !strings.Contains(stdout, part) {
			t.Errorf("version prints %q, want %q in it", stdout, part)
		}
	}
}

func TestHealthAsksTheService(t *testing.T) {
	t.Parallel()
	broken := checked{Name: "broker", Missing: "topic order-timeout is not there"}
	for _, tc := range []struct {
		name   string
		answer http.HandlerFunc
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{"ready", readyAnswer(checked{Name: "database", Ready: true}), nil, 0, "database: ok\n", ""},
		{"not ready", readyAnswer(checked{Name: "database", Ready: true}, broken), nil, 1, "database: ok\nbroker: topic order-timeout is not there\n", "lapse: not ready\n"},
		{"alive", func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/healthz" {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			fmt.Fprintln(w, "ok")
		}, []string{"--live"}, 0, "ok\n", ""},
		{"something else", http.NotFound, nil, 1, "404 page not found\n", "is this lapse?"},
		{"frozen", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, []string{"--timeout", "200ms"}, 3, "", "nothing answers"},
		{"no time", http.NotFound, []string{"--timeout", "0s"}, 2, "", "must be positive"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(tc.answer)
			defer server.Close()
			addr := server.Listener.Addr().String()
			code, stdout, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + addr}, append([]string{"health", "relay"}, tc.args...)...)
			if code != tc.code || stdout != tc.stdout || !strings.Contains(stderr, tc.stderr) {
				t.Errorf("exit code %d, stdout %q, stderr %q; want %d, %q, %q", code, stdout, stderr, tc.code, tc.stdout, tc.stderr)
			}
		})
	}
}

func readyAnswer(checks ...checked) http.HandlerFunc {
	w := &watch{last: readiness{Ready: !slices.ContainsFunc(checks, func(c checked) bool { return !c.Ready }), Checks: checks}}
	return w.ServeHTTP
}

func TestHealthAsksOnTheLoopbackWhatListensOnAllAddresses(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		":9870": "127.0.0.1:9870", "0.0.0.0:9870": "127.0.0.1:9870", "[::]:9870": "[::1]:9870", "127.0.0.1:1": "127.0.0.1:1", "10.1.2.3:9870": "10.1.2.3:9870",
	} {
		if got := askAddr(in); got != want {
			t.Errorf("askAddr(%q) is %q, want %q", in, got, want)
		}
	}
}

func TestTheLogFollowsLevelAndFormat(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ level, format, want string }{
		{"info", "json", `"msg":"told"`}, {"info", "auto", `"msg":"told"`}, {"debug", "text", "msg=told"}, {"warn", "text", ""}, {"error", "json", ""},
	} {
		var b output
		newLogger(&b, tc.level, tc.format).Info("told")
		if got := b.String(); !strings.Contains(got, tc.want) || tc.want == "" && got != "" {
			t.Errorf("%s, %s: the log is %q, want %q in it", tc.level, tc.format, got, tc.want)
		}
	}
}

func TestOnlyAMissingTopicIsKeptFromTheLogOfDeadLetters(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err   error
		level string
		want  string
	}{
		{fmt.Errorf("ask for topic: %w", &rmq.StatusError{Code: 40402}), "info", ""},
		{fmt.Errorf("ask for topic: %w", &rmq.StatusError{Code: 40402}), "debug", `"level":"DEBUG"`},
		{&rmq.StatusError{Code: 40403, Message: "no such group"}, "info", `"level":"WARN"`},
		{errors.New("connection refused"), "info", `"level":"WARN"`},
	} {
		var b output
		slog.New(untilFirstDeadLetter{newLogger(&b, tc.level, "json").Handler()}).With("service", "consume").Warn("rocketmq is not ready", "err", tc.err)
		if got := b.String(); !strings.Contains(got, tc.want) || tc.want == "" && got != "" {
			t.Errorf("%v at level %s: the log is %q, want %q in it", tc.err, tc.level, got, tc.want)
		}
	}
}

func TestReadinessIsLoggedWhenItChanges(t *testing.T) {
	t.Parallel()
	var b output
	var database, broker, loop error
	reg := prometheus.NewRegistry()
	w, err := newWatch("relay", []check{
		{name: checkDatabase, ready: func(context.Context) error { return database }},
		{name: checkBroker, ready: func(context.Context) error { return broker }},
		{name: "relay", ready: func(context.Context) error { return errors.Join(database, broker, loop) }, loop: true},
	}, newLogger(&b, "info", "json"), reg)
	if err != nil {
		t.Fatal(err)
	}
	look := func(when, log, answer string) {
		t.Helper()
		before := len(b.String())
		w.look(t.Context())
		w.look(t.Context())
		got := regexp.MustCompile(`"time":"[^"]*",`).ReplaceAllString(b.String()[before:], "")
		if got != log {
			t.Errorf("%s: the log is %q, want %q", when, got, log)
		}
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
		if body := rec.Body.String(); !strings.Contains(body, answer) || (rec.Code == http.StatusOK) != strings.Contains(body, `"ready": true,
  "service"`) {
			t.Errorf("%s: /readyz answers %d %s, want %q in it", when, rec.Code, body, answer)
		}
	}
	broker = errors.New("no route")
	look("at the start", `{"level":"INFO","msg":"waiting","for":"broker,relay"}`+"\n", `"missing": "waits for the broker"`)
	broker, loop = nil, errors.New("not asked yet")
	look("when one thing comes after the other", `{"level":"INFO","msg":"waiting","for":"relay"}`+"\n", `"missing": "not asked yet"`)
	loop = nil
	look("when all is there", `{"level":"INFO","msg":"ready"}`+"\n", `"version"`)
	database = errors.New("connection refused")
	look("when the database goes", `{"level":"WARN","msg":"not ready","missing":"database,relay","err":"connection refused"}`+"\n", `"missing": "connection refused"`)
	database, broker = nil, errors.New("no route")
	look("when the broker goes instead", `{"level":"WARN","msg":"not ready","missing":"broker,relay"}`+"\n", `"missing": "no route"`)
	broker = nil
	look("when it is back", `{"level":"INFO","msg":"ready"}`+"\n", `"version"`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.run(ctx)
	if got := gathered(t, reg)["lapse_ready"]; got != 0 {
		t.Errorf("lapse_ready is %v at the end, want 0", got)
	}
}

func TestFiguresOfADatabaseThatCannotBeAskedAreNotShown(t *testing.T) {
	t.Parallel()
	var now time.Time
	var fail error
	s := &sampler{
		stats:    func(context.Context) (orders.Stats, error) { return orders.Stats{Overdue: 7, HistoryList: -1}, fail },
		counters: func() orders.Counters { return orders.Counters{Retries: 3} },
		log:      newLogger(new(output), "info", "json"),
		now:      func() time.Time { return now },
	}
	now = time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC)
	reg := prometheus.NewRegistry()
	if err := reg.Register(s); err != nil {
		t.Fatal(err)
	}
	expect := func(when string, want map[string]float64) {
		t.Helper()
		got := gathered(t, reg)
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: the metrics are %v, want %v", when, got, want)
		}
	}
	counters := map[string]float64{"lapse_transaction_retries_total": 3, "lapse_stock_missing_total": 0, "lapse_parked_total": 0, "lapse_database_sample_errors_total": 0}
	expect("before the first sample", counters)
	s.sample(t.Context())
	fresh := map[string]float64{"lapse_orders_overdue": 7, "lapse_outbox_pending_rows": 0, "lapse_outbox_oldest_seconds": 0, "lapse_events_pending_rows": 0, "lapse_events_oldest_seconds": 0, "lapse_parked_rows": 0, "lapse_database_sample_timestamp_seconds": float64(now.Unix())}
	for name, v := range counters {
		fresh[name] = v
	}
	expect("after it", fresh)
	fail = errors.New("gone")
	now = now.Add(sampleStale)
	s.sample(t.Context())
	fresh["lapse_database_sample_errors_total"] = 1
	expect("as long as it is fresh", fresh)
	now = now.Add(time.Second)
	counters["lapse_database_sample_errors_total"] = 1
	counters["lapse_database_sample_timestamp_seconds"] = float64(now.Add(-time.Second - sampleStale).Unix())
	expect("when it is stale", counters)
}

func gathered(t *testing.T, reg prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				got[f.GetName()] = m.GetCounter().GetValue()
			case dto.MetricType_GAUGE:
				got[f.GetName()] = m.GetGauge().GetValue()
			}
		}
	}
	return got
}

// closedAddr is an address of the loopback at which nothing listens.
func closedAddr(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return addr
}
