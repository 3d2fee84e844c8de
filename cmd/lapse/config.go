package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/lapse-orders/lapse/configs"
	"github.com/lapse-orders/lapse/orders"
)

// settings is the effective configuration. The values of the libraries' keys are handed to their own Config types; nothing outside this
// package sees it.
type settings struct {
	MySQL struct {
		DSN              string        `mapstructure:"dsn"`
		DSNFile          string        `mapstructure:"dsn_file"`
		DSNMigrate       string        `mapstructure:"dsn_migrate"`
		DSNMigrateFile   string        `mapstructure:"dsn_migrate_file"`
		DSNRelay         string        `mapstructure:"dsn_relay"`
		DSNRelayFile     string        `mapstructure:"dsn_relay_file"`
		DSNConsume       string        `mapstructure:"dsn_consume"`
		DSNConsumeFile   string        `mapstructure:"dsn_consume_file"`
		DSNRefund        string        `mapstructure:"dsn_refund"`
		DSNRefundFile    string        `mapstructure:"dsn_refund_file"`
		DSNReconcile     string        `mapstructure:"dsn_reconcile"`
		DSNReconcileFile string        `mapstructure:"dsn_reconcile_file"`
		DSNRead          string        `mapstructure:"dsn_read"`
		DSNReadFile      string        `mapstructure:"dsn_read_file"`
		DSNReplica       string        `mapstructure:"dsn_replica"`
		DSNReplicaFile   string        `mapstructure:"dsn_replica_file"`
		MaxOpenConns     int           `mapstructure:"max_open_conns"`
		DialTimeout      time.Duration `mapstructure:"dial_timeout"`
		IOTimeout        time.Duration `mapstructure:"io_timeout"`
	} `mapstructure:"mysql"`
	Orders struct {
		Timeout      time.Duration `mapstructure:"timeout"`
		Policies     string        `mapstructure:"policies"`
		MaxLifetime  time.Duration `mapstructure:"max_lifetime"`
		KeyRetention time.Duration `mapstructure:"key_retention"`
	} `mapstructure:"orders"`
	RocketMQ struct {
		Endpoints         string        `mapstructure:"endpoints"`
		Topic             string        `mapstructure:"topic"`
		Group             string        `mapstructure:"group"`
		Namespace         string        `mapstructure:"namespace"`
		AdminEndpoint     string        `mapstructure:"admin_endpoint"`
		AccessKey         string        `mapstructure:"access_key"`
		SecretKey         string        `mapstructure:"secret_key"`
		SecretKeyFile     string        `mapstructure:"secret_key_file"`
		SecurityToken     string        `mapstructure:"security_token"`
		SecurityTokenFile string        `mapstructure:"security_token_file"`
		RequestTimeout    time.Duration `mapstructure:"request_timeout"`
		TLS               struct {
			Enabled            bool   `mapstructure:"enabled"`
			CAFile             string `mapstructure:"ca_file"`
			ServerName         string `mapstructure:"server_name"`
			InsecureSkipVerify bool   `mapstructure:"insecure_skip_verify"`
			CertFile           string `mapstructure:"cert_file"`
			KeyFile            string `mapstructure:"key_file"`
		} `mapstructure:"tls"`
	} `mapstructure:"rocketmq"`
	Relay struct {
		Tick                time.Duration `mapstructure:"tick"`
		MaxOrdersPerMessage int           `mapstructure:"max_orders_per_message"`
		Linger              time.Duration `mapstructure:"linger"`
		MaxDelay            time.Duration `mapstructure:"max_delay"`
		Lease               time.Duration `mapstructure:"lease"`
		SendTimeout         time.Duration `mapstructure:"send_timeout"`
		ClaimLimit          int           `mapstructure:"claim_limit"`
		MaxInHand           int           `mapstructure:"max_in_hand"`
		Claimers            int           `mapstructure:"claimers"`
		Senders             int           `mapstructure:"senders"`
		Markers             int           `mapstructure:"markers"`
		Poll                time.Duration `mapstructure:"poll"`
		BackoffMin          time.Duration `mapstructure:"backoff_min"`
		BackoffMax          time.Duration `mapstructure:"backoff_max"`
		PauseMax            time.Duration `mapstructure:"pause_max"`
		PurgeInterval       time.Duration `mapstructure:"purge_interval"`
		PurgeBatch          int           `mapstructure:"purge_batch"`
	} `mapstructure:"relay"`
	Consumer struct {
		BatchOrders       int           `mapstructure:"batch_orders"`
		BatchWait         time.Duration `mapstructure:"batch_wait"`
		Workers           int           `mapstructure:"workers"`
		MaxInHand         int           `mapstructure:"max_in_hand"`
		EarlyWait         time.Duration `mapstructure:"early_wait"`
		Receivers         int           `mapstructure:"receivers"`
		MaxMessages       int           `mapstructure:"max_messages"`
		Invisible         time.Duration `mapstructure:"invisible"`
		CancelTimeout     time.Duration `mapstructure:"cancel_timeout"`
		Ackers            int           `mapstructure:"ackers"`
		NewerVersionDelay time.Duration `mapstructure:"newer_version_delay"`
		BackoffMin        time.Duration `mapstructure:"backoff_min"`
		BackoffMax        time.Duration `mapstructure:"backoff_max"`
		GiveUpAfter       time.Duration `mapstructure:"give_up_after"`
	} `mapstructure:"consumer"`
	Reconcile struct {
		Schedule      string        `mapstructure:"schedule"`
		Timezone      string        `mapstructure:"timezone"`
		Grace         time.Duration `mapstructure:"grace"`
		MaxLag        time.Duration `mapstructure:"max_lag"`
		OnLag         string        `mapstructure:"on_lag"`
		Page          int           `mapstructure:"page"`
		Batch         int           `mapstructure:"batch"`
		Workers       int           `mapstructure:"workers"`
		Rate          int           `mapstructure:"rate"`
		PrimaryRate   int           `mapstructure:"primary_rate"`
		MaxLockWaits  int           `mapstructure:"max_lock_waits"`
		PauseLag      time.Duration `mapstructure:"pause_lag"`
		Lease         time.Duration `mapstructure:"lease"`
		CancelTimeout time.Duration `mapstructure:"cancel_timeout"`
		OutboxAge     time.Duration `mapstructure:"outbox_age"`
		RetryAfter    time.Duration `mapstructure:"retry_after"`
	} `mapstructure:"reconcile"`
	Gateway struct {
		URL             string        `mapstructure:"url"`
		Name            string        `mapstructure:"name"`
		Secret          string        `mapstructure:"secret"`
		SecretFile      string        `mapstructure:"secret_file"`
		Timeout         time.Duration `mapstructure:"timeout"`
		DecideWithin    time.Duration `mapstructure:"decide_within"`
		Concurrency     int           `mapstructure:"concurrency"`
		HoldMin         time.Duration `mapstructure:"hold_min"`
		HoldMax         time.Duration `mapstructure:"hold_max"`
		GiveUpAfter     time.Duration `mapstructure:"give_up_after"`
		BreakerFailures int           `mapstructure:"breaker_failures"`
		BreakerPause    time.Duration `mapstructure:"breaker_pause"`
	} `mapstructure:"gateway"`
	Refund struct {
		Batch       int           `mapstructure:"batch"`
		Lease       time.Duration `mapstructure:"lease"`
		Poll        time.Duration `mapstructure:"poll"`
		BackoffMin  time.Duration `mapstructure:"backoff_min"`
		BackoffMax  time.Duration `mapstructure:"backoff_max"`
		MaxAttempts int           `mapstructure:"max_attempts"`
	} `mapstructure:"refund"`
	Outbox struct {
		Retention time.Duration `mapstructure:"retention"`
	} `mapstructure:"outbox"`
	Events struct {
		Topic  string `mapstructure:"topic"`
		Source string `mapstructure:"source"`
	} `mapstructure:"events"`
	Retention struct {
		Orders   time.Duration `mapstructure:"orders"` // 0: never
		Events   time.Duration `mapstructure:"events"`
		Parked   time.Duration `mapstructure:"parked"`
		Runs     time.Duration `mapstructure:"runs"`
		Interval time.Duration `mapstructure:"interval"`
		Batch    int           `mapstructure:"batch"`
	} `mapstructure:"retention"`
	Shutdown struct {
		Grace time.Duration `mapstructure:"grace"`
	} `mapstructure:"shutdown"`
	HTTP struct {
		Addr  string `mapstructure:"addr"`
		Pprof string `mapstructure:"pprof"`
	} `mapstructure:"http"`
	API struct {
		Addr              string        `mapstructure:"addr"`
		Tokens            string        `mapstructure:"tokens"`
		TokensFile        string        `mapstructure:"tokens_file"`
		PaymentSecret     string        `mapstructure:"payment_secret"`
		PaymentSecretFile string        `mapstructure:"payment_secret_file"`
		MaxBody           int           `mapstructure:"max_body"`
		MaxInFlight       int           `mapstructure:"max_in_flight"`
		RequestTimeout    time.Duration `mapstructure:"request_timeout"`
		ReadTimeout       time.Duration `mapstructure:"read_timeout"`
		IdleTimeout       time.Duration `mapstructure:"idle_timeout"`
	} `mapstructure:"api"`
	Doctor struct {
		Topic   string        `mapstructure:"topic"`
		Group   string        `mapstructure:"group"`
		Timeout time.Duration `mapstructure:"timeout"`
	} `mapstructure:"doctor"`
	Log struct {
		Level  string `mapstructure:"level"`
		Format string `mapstructure:"format"`
	} `mapstructure:"log"`
}

// effective is a loaded configuration and how it came about.
type effective struct {
	settings
	// values by key name, and where each comes from that is not the default; a secret that was read from a file is in values.
	values  map[string]any
	origins map[string]string
	// policies are those of orders.policies.
	policies []orders.Policy
	// warnings are for the log: nothing of them keeps lapse from working.
	warnings []string
	// unread are the environment variables that look like settings and are none, with what may have been meant.
	unread []string
}

// sources is what a configuration is made of, from the weakest to the strongest.
type sources struct {
	file    string // path; empty: none
	named   string // who named the file: "--config", "LAPSE_CONFIG"
	environ []string
	flags   []assignment
	set     []string // key=value
}

// assignment is one setting as a source has it.
type assignment struct {
	key, words, origin string
}

// configError says that lapse cannot start like this; its exit code is 2.
type configError struct{ problems []error }

func (e *configError) Error() string {
	if len(e.problems) == 1 {
		return "configuration: " + e.problems[0].Error()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "configuration: %d problems", len(e.problems))
	for _, p := range e.problems {
		fmt.Fprintf(&b, "\n  - %s", p)
	}
	return b.String()
}

func (e *configError) Unwrap() []error { return e.problems }

func configProblem(format string, args ...any) error {
	return &configError{problems: []error{fmt.Errorf(format, args...)}}
}

// load reads all sources, checks every value where it comes from, and gives what is in effect. It collects all problems before it gives
// up, so that a new deployment does not meet them one restart after another; the error is then a *configError.
func load(src sources) (*effective, error) {
	l := &loading{
		v:         viper.New(),
		effective: effective{origins: map[string]string{}, values: map[string]any{}},
		rank:      map[string]int{},
	}
	l.readFile("the embedded default.yaml", configs.Default)
	if len(l.problems) > 0 {
		return nil, &configError{l.problems}
	}
	clear(l.origins)
	clear(l.rank)
	if src.file != "" {
		// Read here and not by viper, whose error for a named file that is missing is not its ConfigFileNotFoundError.
		data, err := os.ReadFile(src.file)
		if err != nil {
			return nil, configProblem("read the file that %s names: %w", src.named, err)
		}
		l.nextSource()
		l.readFile(src.file, data)
	}
	l.nextSource()
	l.readEnvironment(src.environ)
	l.nextSource()
	for _, a := range src.flags {
		l.take(a, nil)
	}
	l.nextSource()
	for _, s := range src.set {
		name, words, ok := strings.Cut(s, "=")
		if !ok {
			l.refuse("--set %q has no =; write --set key=value", s)
			continue
		}
		if theKeys[name].secret {
			l.refuse("--set %s: every user of this machine can read it there; set %s, or %s_FILE to a file with it", name, theKeys[name].env(), theKeys[name].env())
			continue
		}
		l.take(assignment{key: name, words: words, origin: "--set"}, nil)
	}
	l.readSecrets()
	if len(l.problems) == 0 {
		l.decode()
	}
	if len(l.problems) == 0 {
		l.checkTogether()
	}
	if len(l.problems) > 0 {
		return nil, &configError{l.problems}
	}
	return &l.effective, nil
}

// loading is a load under way. viper holds the layers and decodes them into settings; it is given checked values under known keys only,
// so that none of its lenience (case, types, unknown keys) can be met.
type loading struct {
	effective
	v        *viper.Viper
	problems []error
	source   int            // of which of the sources is read, from the weakest
	rank     map[string]int // the source that set a key last
}

func (l *loading) nextSource() { l.source++ }

func (l *loading) refuse(format string, args ...any) {
	l.problems = append(l.problems, fmt.Errorf(format, args...))
}

// take checks one setting and puts it over what weaker sources said. node is its place in a YAML file, nil for other sources.
func (l *loading) take(a assignment, node *yaml.Node) {
	k, known := theKeys[a.key]
	if !known {
		hint := ""
		if like := nearest(a.key, keyNames()); like != "" {
			hint = fmt.Sprintf("; did you mean %s?", like)
		}
		l.refuse("%s: there is no key %q%s", a.origin, a.key, hint)
		return
	}
	value, err := k.parse(a.words)
	if node != nil {
		if wrong := yamlKind(k, node); wrong != nil {
			err = wrong
		}
	}
	if err != nil {
		shown := fmt.Sprintf(" %q", a.words)
		if k.secret {
			shown = ""
		}
		allowed := ""
		if k.form == nil || k.kind != kindText {
			allowed = "; allowed: " + k.allowed()
		}
		l.refuse("%s:%s (from %s) %w%s", k.name, shown, a.origin, err, allowed)
		return
	}
	if l.source == 0 {
		l.v.SetDefault(k.name, value)
	} else {
		l.v.Set(k.name, value)
		l.origins[k.name] = a.origin
		l.rank[k.name] = l.source
	}
}

// yamlKind refuses a value whose type in the file is another than the key's: 5 for a text may have been 05, yes for a text is no bool.
func yamlKind(k key, node *yaml.Node) error {
	tag := node.ShortTag()
	switch {
	case tag == "!!null":
		return errors.New("has no value; leave the key out, or write \"\" for an empty text")
	case node.Kind != yaml.ScalarNode:
		return fmt.Errorf("is a list or a section; it must be %s", k.kind)
	case k.kind == kindText && tag != "!!str":
		return errors.New("is not a text; put it in quotes")
	case k.kind == kindDuration && (tag == "!!int" || tag == "!!float"):
		return errors.New("is a number without a unit")
	case k.kind == kindBool && tag != "!!bool":
		return errors.New("is neither true nor false")
	case k.kind == kindInt && tag != "!!int":
		return errors.New("is not a whole number")
	}
	return nil
}

func keyNames() []string {
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	return names
}

// readFile takes over the settings of a YAML document. It is walked as nodes, not decoded into a map: so a problem can name its line, a
// key that is given twice is seen, and a key is taken as it is written.
func (l *loading) readFile(name string, data []byte) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return // empty, or comments only
	case err != nil:
		l.refuse("%s: %s", name, strings.TrimPrefix(err.Error(), "yaml: "))
		return
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		l.refuse("%s: has a second document after \"---\", or rubbish at its end; put everything into one", name)
		return
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		if root.ShortTag() != "!!null" {
			l.refuse("%s:%d: expected sections such as \"relay:\", not a single value", name, root.Line)
		}
		return
	}
	l.walk(name, "", root)
}

func (l *loading) walk(file, prefix string, section *yaml.Node) {
	lines := map[string]int{}
	for i := 0; i+1 < len(section.Content); i += 2 {
		head, node := section.Content[i], section.Content[i+1]
		if node.Kind == yaml.AliasNode {
			node = node.Alias
		}
		name := prefix + head.Value
		where := fmt.Sprintf("%s:%d", file, head.Line)
		if line, twice := lines[name]; twice {
			l.refuse("%s: %s is given twice, first in line %d", where, name, line)
			continue
		}
		lines[name] = head.Line
		if section, rest, dotted := strings.Cut(head.Value, "."); dotted {
			// Two spellings of one key would make "given twice" hard to see.
			l.refuse("%s: %s is written with a dot; write %s under %s:", where, name, rest, prefix+section)
			continue
		}
		isSection := slices.ContainsFunc(keys, func(k key) bool { return strings.HasPrefix(k.name, name+".") })
		switch {
		case isSection && node.Kind == yaml.MappingNode:
			l.walk(file, name+".", node)
		case isSection && node.ShortTag() == "!!null":
			// A section with all its keys commented out.
		case isSection:
			l.refuse("%s: %s is a section; its keys go under it, indented", where, name)
		default:
			l.take(assignment{key: name, words: node.Value, origin: where}, node)
		}
	}
}

// notOurs are variables with our prefix that are no settings: of the tests, of the development stack, and the one that names the file.
func notOurs(variable string) bool {
	return strings.HasPrefix(variable, "LAPSE_TEST_") || strings.HasPrefix(variable, "LAPSE_STACK_") ||
		variable == "LAPSE_CONFIG"
}

// ofKubernetes are the variables that it sets in every pod for each service: of one that is named lapse-api, LAPSE_API_PORT=tcp://… and more.
func ofKubernetes(variable, words string) bool {
	return serviceVariable.MatchString(variable) || strings.HasSuffix(variable, "_PORT") && strings.Contains(words, "://")
}

var serviceVariable = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$`)

func (l *loading) readEnvironment(environ []string) {
	for _, entry := range environ {
		variable, words, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(variable, envPrefix) || notOurs(variable) || words == "" {
			continue
		}
		k, known := theVariables[variable]
		if !known {
			// Not refused: the variables of a pod are not all its own; Kubernetes sets LAPSE_… for every service of that name.
			hint := ""
			names := make([]string, 0, len(theVariables))
			for _, k := range keys {
				names = append(names, k.env())
			}
			if like := nearest(variable, names); like != "" {
				hint = "; did you mean " + like + "?"
			}
			said := fmt.Sprintf("the environment variable %s is no setting of lapse%s", variable, hint)
			l.warnings = append(l.warnings, said)
			if !ofKubernetes(variable, words) {
				l.unread = append(l.unread, said)
			}
			continue
		}
		l.take(assignment{key: k.name, words: words, origin: "environment " + variable}, nil)
	}
}

// readSecrets replaces each secret that is in a file of its own by what the file holds.
func (l *loading) readSecrets() {
	for _, k := range keys {
		if k.fileOf == "" {
			continue
		}
		path := l.v.GetString(k.name)
		secret := theKeys[k.fileOf]
		if path == "" || l.rank[secret.name] > l.rank[k.name] {
			continue // none, or a stronger source gives the secret itself
		}
		if l.rank[secret.name] == l.rank[k.name] && l.v.GetString(secret.name) != "" {
			l.refuse("%s (from %s) and %s (from %s) are both given; keep one", secret.name, l.origins[secret.name], k.name, l.origins[k.name])
			continue
		}
		data, err := os.ReadFile(path) //nolint:gosec // the operator names it
		if err != nil {
			l.refuse("%s: %q (from %s) cannot be read: %w", k.name, path, l.origins[k.name], err)
			continue
		}
		words := strings.TrimRight(string(data), "\r\n")
		if words == "" {
			l.refuse("%s: %q (from %s) is empty; the file holds the value of %s", k.name, path, l.origins[k.name], secret.name)
			continue
		}
		l.take(assignment{key: secret.name, words: words, origin: fmt.Sprintf("file %s, which %s names", path, k.name)}, nil)
	}
}

func (l *loading) decode() {
	// Exact: a key without a field, or a field of another type, is a mistake in this package, found by the first test that loads anything.
	err := l.v.UnmarshalExact(&l.settings, func(c *mapstructure.DecoderConfig) {
		c.WeaklyTypedInput = false
		c.ErrorUnset = true
		c.DecodeHook = nil
	})
	if err != nil {
		l.refuse("decode: %w", err)
	}
	for _, k := range keys {
		l.values[k.name] = l.v.Get(k.name)
	}
}

// checkTogether refuses settings that are allowed alone and not beside one another. The libraries refuse them too, when a service starts
// and in the names of their fields; here every command does, in the names of the keys.
func (l *loading) checkTogether() {
	s := &l.settings
	is := func(name string) string {
		words, err := l.show(theKeys[name])
		if err != nil {
			words = err.Error()
		}
		return fmt.Sprintf("%s is %s%s", name, words, l.by(name))
	}
	for _, pair := range []struct {
		low, high string
		wrong     bool
	}{
		{"relay.claim_limit", "relay.max_in_hand", s.Relay.ClaimLimit > s.Relay.MaxInHand},
		{"relay.backoff_min", "relay.backoff_max", s.Relay.BackoffMin > s.Relay.BackoffMax},
		{"consumer.backoff_min", "consumer.backoff_max", s.Consumer.BackoffMin > s.Consumer.BackoffMax},
		{"gateway.hold_min", "gateway.hold_max", s.Gateway.HoldMin > s.Gateway.HoldMax},
		{"refund.backoff_min", "refund.backoff_max", s.Refund.BackoffMin > s.Refund.BackoffMax},
	} {
		if pair.wrong {
			l.refuse("%s and %s; the first must not be more than the second", is(pair.low), is(pair.high))
		}
	}
	if s.Consumer.CancelTimeout >= s.Consumer.Invisible {
		l.refuse("%s and %s; a transaction must be over before its message shows again, so the first must be shorter", is("consumer.cancel_timeout"), is("consumer.invisible"))
	}
	if s.Relay.Linger+s.Relay.SendTimeout > s.Relay.Lease/2 {
		l.refuse("%s, %s and %s; the first two together must be at most half of the third, so that a send ends before the lease does", is("relay.linger"), is("relay.send_timeout"), is("relay.lease"))
	}
	if s.Gateway.Timeout > s.Refund.Lease/4 {
		l.refuse("%s and %s; the first must be at most a quarter of the second, so that two tries end well before the lease does", is("gateway.timeout"), is("refund.lease"))
	}
	if s.Gateway.URL != "" {
		for _, name := range []string{"gateway.name", "gateway.secret"} {
			if l.values[name] == "" {
				l.refuse("gateway.url is given%s and %s is not; give all three, or none", l.by("gateway.url"), name)
			}
		}
	}
	if s.Relay.Tick%time.Millisecond != 0 {
		l.refuse("%s; it must be whole milliseconds", is("relay.tick"))
	}
	if s.Orders.Timeout > s.Orders.MaxLifetime {
		l.refuse("orders.timeout is %s%s, longer than orders.max_lifetime, %s%s", short(s.Orders.Timeout), l.by("orders.timeout"), short(s.Orders.MaxLifetime), l.by("orders.max_lifetime"))
	}
	l.checkPolicies()
	if s.Retention.Orders != 0 && s.Retention.Orders < s.Orders.KeyRetention {
		l.refuse("%s and %s; an order must not go before the key that stands for it, so the first must not be less than the second", is("retention.orders"), is("orders.key_retention"))
	}
	for _, name := range []string{"rocketmq.topic", "doctor.topic"} {
		if topic := l.values[name]; topic != nil && topic != "" && topic == s.Events.Topic {
			l.refuse("%s and %s are one topic; events need a topic of their own, of type NORMAL", is("events.topic"), is(name))
		}
	}
	if s.Events.Topic != "" && s.Events.Source == "" {
		l.refuse("events.source is empty%s; it is a URI reference that says whose events these are, such as /lapse", l.by("events.source"))
	}
	for _, pair := range [][2]string{{"rocketmq.access_key", "rocketmq.secret_key"}, {"rocketmq.tls.cert_file", "rocketmq.tls.key_file"}} {
		a, b := pair[0], pair[1]
		if l.values[a] == "" {
			a, b = b, a
		}
		if l.values[a] != "" && l.values[b] == "" {
			l.refuse("%s is given%s and %s is not; give both, or neither", a, l.by(a), b)
		}
	}
	for _, name := range []string{"rocketmq.endpoints", "rocketmq.topic", "rocketmq.group"} {
		if l.values[name] == "" {
			l.refuse("%s is empty%s", name, l.by(name))
		}
	}
}

// checkPolicies reads orders.policies once more, with the settings that they rest on.
func (l *loading) checkPolicies() {
	var err error
	if l.policies, err = orders.ParsePolicies(l.Orders.Policies); err != nil {
		l.refuse("orders.policies%s: %w", l.by("orders.policies"), err)
		return
	}
	for _, p := range l.policies {
		if deadline := cmp.Or(p.Timeout, l.Orders.Timeout) + p.Grace; !p.Never && deadline > l.Orders.MaxLifetime {
			l.refuse("orders.policies%s: %q has its deadline %s after placing, later than orders.max_lifetime, %s%s",
				l.by("orders.policies"), p, short(deadline), short(l.Orders.MaxLifetime), l.by("orders.max_lifetime"))
		}
	}
}

func (e *effective) by(name string) string {
	if o := e.origins[name]; o != "" {
		return " (from " + o + ")"
	}
	return ""
}

// role is on whose behalf the database is used.
type role string

const (
	roleAPI       role = "dsn"
	roleMigrate   role = "dsn_migrate"
	roleRelay     role = "dsn_relay"
	roleConsume   role = "dsn_consume"
	roleRefund    role = "dsn_refund"
	roleReconcile role = "dsn_reconcile"
	roleRead      role = "dsn_read"
)

// dsn gives the DSN of a role: its own, otherwise mysql.dsn.
func (e *effective) dsn(r role) (string, error) {
	own, _ := e.values["mysql."+string(r)].(string)
	dsn := cmp.Or(own, e.MySQL.DSN)
	if dsn == "" {
		k := theKeys["mysql."+string(r)]
		also := ""
		if r != roleAPI {
			also = fmt.Sprintf("; %s for this command alone", k.env())
		}
		return "", configProblem("the database is not named: set LAPSE_MYSQL_DSN to user:password@tcp(host:port)/database, or LAPSE_MYSQL_DSN_FILE to a file with it%s", also)
	}
	return dsn, nil
}
