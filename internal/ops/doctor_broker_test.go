package ops

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
)

func TestASoundBrokerHasNothingWrong(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	cfg := onRealBroker(t, b)
	cfg.AdminEndpoint = adminAddr(t)
	cfg.EventsTopic = b.NewTopic(t, admin.Normal)
	found := look(t, cfg, "broker.", "clock.broker")
	wantWrong(t, found, nil)
	wantSound(t, found, slices.Collect(maps.Keys(found))...)
}

func TestTopicsAndGroupsAreLookedAtOnARealBroker(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	for name, tc := range map[string]struct {
		change func(t *testing.T, cfg *DoctorConfig)
		want   map[string]string
	}{
		"no topic": {func(_ *testing.T, cfg *DoctorConfig) { cfg.Topic += "-no" },
			map[string]string{"broker.topic": "-a +message.type=DELAY"}},
		"a topic of type NORMAL": {func(t *testing.T, cfg *DoctorConfig) { cfg.Topic = b.NewTopic(t, admin.Normal) },
			map[string]string{"broker.topic": "is of type NORMAL"}},
		"no group": {func(t *testing.T, cfg *DoctorConfig) { cfg.Group += "-no"; reader(t, b, cfg.Group, 1000) },
			map[string]string{"broker.group": "-r 16"}},
		"a group of few retries": {func(t *testing.T, cfg *DoctorConfig) { cfg.Group = b.NewGroup(t, 3); reader(t, b, cfg.Group, 1000) },
			map[string]string{"broker.group": "3 retries, fewer than 16"}},
		"no reader of dead letters": {func(t *testing.T, cfg *DoctorConfig) { cfg.Group = b.NewGroup(t, 16) },
			map[string]string{"broker.dead_letters": "-dlq is not there"}},
		"a reader that never sees one": {func(t *testing.T, cfg *DoctorConfig) { cfg.Group = b.NewGroup(t, 16); reader(t, b, cfg.Group, 17) },
			map[string]string{"broker.dead_letters": "17 retries"}},
		"an events topic of type DELAY": {func(_ *testing.T, cfg *DoctorConfig) { cfg.EventsTopic = cfg.Topic },
			map[string]string{"broker.events_topic": "is of type DELAY"}},
		"no events topic": {func(_ *testing.T, cfg *DoctorConfig) { cfg.EventsTopic = cfg.Topic + "-no" },
			map[string]string{"broker.events_topic": "message.type=NORMAL"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := onRealBroker(t, b)
			tc.change(t, &cfg)
			wantWrong(t, look(t, cfg, "broker.reachable", "broker.tls", "broker.credentials", "broker.topic", "broker.group", "broker.dead_letters", "broker.events_topic"), tc.want)
		})
	}
}

func TestARelayThatDoesNotFitTheBrokerIsFound(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	for name, tc := range map[string]struct {
		change func(cfg *DoctorConfig)
		want   map[string]string
	}{
		"a delay that the proxy refuses": {func(cfg *DoctorConfig) { cfg.MaxDelay = 25 * time.Hour },
			map[string]string{"broker.max_delay": "LAPSE_RELAY_MAX_DELAY"}},
		"a delay longer than files are kept": {func(cfg *DoctorConfig) { cfg.MaxDelay, cfg.AdminEndpoint = 60*time.Hour, adminAddr(t) },
			map[string]string{"broker.max_delay": "refused", "broker.retention": "kept for 72 h"}},
		"a tick that is too coarse, as the broker says": {func(cfg *DoctorConfig) { cfg.Tick, cfg.AdminEndpoint = time.Second, adminAddr(t) },
			map[string]string{"broker.precision": "LAPSE_RELAY_TICK=100ms"}},
		"a tick that is too coarse, as measured": {func(cfg *DoctorConfig) { cfg.Tick = time.Second },
			map[string]string{"broker.precision": "measured with 6 messages"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := onRealBroker(t, b)
			tc.change(&cfg)
			wantWrong(t, look(t, cfg, "broker."), tc.want)
		})
	}
}

func TestWithoutAnAdminEndpointItSaysWhatIsNotChecked(t *testing.T) {
	t.Parallel()
	cfg, _ := onEmbedded(t)
	found := look(t, cfg, "broker.")
	wantWrong(t, found, nil)
	wantNotChecked(t, found, "LAPSE_ROCKETMQ_ADMIN_ENDPOINT", "broker.settings", "broker.retention", "broker.offsets")
	wantNotChecked(t, found, "events.topic is not set", "broker.events_topic")
	wantSound(t, found, "broker.reachable", "broker.tls", "broker.credentials", "broker.topic", "broker.group", "broker.dead_letters", "broker.max_delay", "broker.precision", "broker.timed_message")
	// One that does not lead to a broker is said, and is no cross of the broker's.
	cfg.AdminEndpoint = closed(t)
	found = look(t, cfg, "broker.settings", "broker.retention", "broker.offsets")
	wantNotChecked(t, found, "connection refused", "broker.settings", "broker.retention", "broker.offsets")
}

func TestTheDoctorMakesItsTopicAndGroupWhereItMay(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	cfg := onRealBroker(t, b)
	for _, err := range []error{b.Admin.DeleteTopic(t.Context(), cfg.OwnTopic), b.Admin.DeleteGroup(t.Context(), cfg.OwnGroup)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	cfg.AdminEndpoint = adminAddr(t)
	cfg.Timeout = 40 * time.Second // the proxy may have been asked for the topic before, and remember for 20 s that there was none
	found := look(t, cfg, "broker.timed_message", "clock.broker")
	wantSound(t, found, "broker.timed_message", "clock.broker")
	group, err := b.Admin.Group(t.Context(), cfg.OwnGroup)
	if err != nil || group.Retries != leastRetries {
		t.Errorf("the group is %+v, %v", group, err)
	}

	// Where it may not, it says how.
	cfg = onRealBroker(t, b)
	cfg.OwnTopic += "-no"
	found = look(t, cfg, "broker.timed_message", "broker.max_delay", "broker.precision", "clock.broker")
	wantNotChecked(t, found, "mqadmin updateTopic", "broker.timed_message", "broker.max_delay", "broker.precision", "clock.broker")
	cfg = onRealBroker(t, b)
	cfg.OwnGroup += "-no"
	wantNotChecked(t, look(t, cfg, "broker.timed_message"), "mqadmin updateSubGroup", "broker.timed_message")
	if _, err := b.Admin.Topic(t.Context(), cfg.OwnTopic+"-no"); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("the topic: %v", err)
	}
	cfg.OwnTopic = ""
	wantNotChecked(t, look(t, cfg, "broker.timed_message"), "empty", "broker.timed_message")
}

func TestTheWrongSideOfTLSIsNamed(t *testing.T) {
	t.Parallel()
	file := func(t *testing.T, pem []byte) string {
		path := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(path, pem, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, tc := range map[string]struct {
		options []lapsetest.Option
		change  func(t *testing.T, c *rmq.Config, b *lapsetest.Broker)
		want    map[string]string
	}{
		"verified": {[]lapsetest.Option{lapsetest.WithTLS()}, func(t *testing.T, c *rmq.Config, b *lapsetest.Broker) {
			c.TLS = rmq.TLS{CAFile: file(t, b.CertPEM())}
		}, nil},
		"an issuer that is not known": {[]lapsetest.Option{lapsetest.WithTLS()}, func(_ *testing.T, c *rmq.Config, _ *lapsetest.Broker) { c.TLS = rmq.TLS{} },
			map[string]string{"broker.tls": "LAPSE_ROCKETMQ_TLS_CA_FILE"}},
		"another name": {[]lapsetest.Option{lapsetest.WithTLS()}, func(t *testing.T, c *rmq.Config, b *lapsetest.Broker) {
			c.TLS = rmq.TLS{CAFile: file(t, b.CertPEM()), ServerName: "other.example"}
		}, map[string]string{"broker.tls": "LAPSE_ROCKETMQ_TLS_SERVER_NAME"}},
		"not verified": {[]lapsetest.Option{lapsetest.WithTLS()}, func(_ *testing.T, c *rmq.Config, _ *lapsetest.Broker) {
			c.TLS = rmq.TLS{InsecureSkipVerify: true}
		}, map[string]string{"broker.tls": "not verified"}},
		"TLS to a plaintext server": {nil, func(_ *testing.T, c *rmq.Config, _ *lapsetest.Broker) { c.TLS = rmq.TLS{} },
			map[string]string{"broker.tls": "LAPSE_ROCKETMQ_TLS_ENABLED=false"}},
		"plaintext to a TLS server": {[]lapsetest.Option{lapsetest.WithTLS()}, func(*testing.T, *rmq.Config, *lapsetest.Broker) {},
			map[string]string{"broker.tls": "LAPSE_ROCKETMQ_TLS_ENABLED=true"}},
		"credentials": {[]lapsetest.Option{lapsetest.WithCredentials("key", "secret")}, func(_ *testing.T, c *rmq.Config, _ *lapsetest.Broker) {
			c.AccessKey, c.SecretKey = "key", "secret"
		}, nil},
		"credentials that are wrong": {[]lapsetest.Option{lapsetest.WithCredentials("key", "secret")}, func(_ *testing.T, c *rmq.Config, _ *lapsetest.Broker) {
			c.AccessKey, c.SecretKey = "key", "hunter2"
		}, map[string]string{"broker.credentials": "refused for key"}},
		"no credentials": {[]lapsetest.Option{lapsetest.WithCredentials("key", "secret")}, func(*testing.T, *rmq.Config, *lapsetest.Broker) {},
			map[string]string{"broker.credentials": "none are given"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, b := onEmbedded(t, tc.options...)
			tc.change(t, &cfg.RocketMQ, b)
			cfg.Timeout = 8 * time.Second
			found := look(t, cfg, "broker.reachable", "broker.tls", "broker.credentials", "broker.topic", "broker.group", "broker.dead_letters", "broker.events_topic")
			wantWrong(t, found, tc.want)
			if tc.want == nil {
				wantSound(t, found, "broker.reachable", "broker.tls", "broker.credentials", "broker.topic", "broker.group", "broker.dead_letters")
			}
			if strings.Contains(fmt.Sprint(found), "hunter2") {
				t.Error("it shows a secret")
			}
		})
	}
}

func TestABrokerThatIsNotThereIsOneCrossAndHoldsUpNothing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		addr string
		want map[string]string
	}{"closed": {closed(t), map[string]string{"broker.reachable": "LAPSE_ROCKETMQ_ENDPOINTS"}}, "deaf": {deaf(t), nil}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, _ := onEmbedded(t)
			cfg.RocketMQ.Endpoints, cfg.AdminEndpoint = tc.addr, tc.addr
			cfg.Timeout = 5 * time.Second
			found := look(t, cfg, "broker.", "clock.broker")
			wantWrong(t, found, tc.want)
			for name, f := range found {
				if f.Verdict == Sound && name != "broker.reachable" {
					t.Errorf("%s is sound: %s", name, f.Found)
				}
			}
		})
	}
	t.Run("one of two endpoints", func(t *testing.T) {
		t.Parallel()
		cfg, _ := onEmbedded(t)
		gone := closed(t)
		cfg.RocketMQ.Endpoints += ";" + gone
		wantWrong(t, look(t, cfg, "broker.reachable"), map[string]string{"broker.reachable": gone})
	})
	t.Run("not usable", func(t *testing.T) {
		t.Parallel()
		cfg, _ := onEmbedded(t)
		cfg.RocketMQ.TLS = rmq.TLS{CAFile: filepath.Join(t.TempDir(), "none")}
		found := look(t, cfg, "broker.reachable", "broker.topic")
		wantWrong(t, found, map[string]string{"broker.reachable": "read the authorities", "broker.topic": "read the authorities"})
	})
}

func TestAMessageThatDoesNotComeBackIsFound(t *testing.T) {
	t.Parallel()
	// The clock of this endpoint stands still: what is due at once comes, and nothing that is due later.
	cfg, _ := onEmbedded(t, lapsetest.WithClock(lapsetest.NewClock(time.Now())), lapsetest.WithPollLimit(time.Second))
	cfg.Timeout = 8 * time.Second
	found := look(t, cfg, "broker.timed_message", "broker.max_delay", "broker.precision")
	wantWrong(t, found, map[string]string{"broker.timed_message": "6 of 6 messages did not come back"})
	wantSound(t, found, "broker.max_delay")
	wantNotChecked(t, found, "too few messages", "broker.precision")
}

func TestABrokersClockIsComparedThroughItsMessages(t *testing.T) {
	t.Parallel()
	for name, skew := range map[string]time.Duration{"ahead": 5 * time.Second, "behind": -5 * time.Second, "a little": 300 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, b := onEmbedded(t)
			b.SetSkew(skew)
			found := look(t, cfg, "clock.broker", "broker.timed_message", "broker.precision")
			want := map[string]string{"clock.broker": name}
			if skew.Abs() < tolerated {
				want = nil
			}
			wantWrong(t, found, want)
			// Measured by the broker's own clock, all else is as it should be.
			wantSound(t, found, "broker.timed_message", "broker.precision")
		})
	}
}

func TestThePrecisionIsMeasured(t *testing.T) {
	t.Parallel()
	for _, p := range precisions {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			cfg, _ := onEmbedded(t, lapsetest.WithPrecision(p))
			cfg.Tick = p
			wantSound(t, look(t, cfg, "broker.precision"), "broker.precision")
			if p != 100*time.Millisecond {
				cfg.Tick = 100 * time.Millisecond
				wantWrong(t, look(t, cfg, "broker.precision"), map[string]string{"broker.precision": "LAPSE_RELAY_TICK=" + p.String()})
			}
		})
	}
}

// On a busy broker the timers fire late; then a fine precision can look like a coarse one, and no verdict is better than a wrong one.
func TestABusyBrokerIsNotTakenForACoarseOne(t *testing.T) {
	t.Parallel()
	base := time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC)
	at := func(late time.Duration) *trip {
		tr := &trip{}
		for _, phase := range phases {
			due := base.Add(phase * time.Millisecond)
			tr.legs = append(tr.legs, leg{due: due, stored: due.Add(late)})
		}
		return tr
	}
	for late, want := range map[time.Duration]time.Duration{0: 100 * time.Millisecond, 30 * time.Millisecond: 100 * time.Millisecond, 950 * time.Millisecond: time.Second} {
		p, residue := at(late).precision()
		if p != want || p > 100*time.Millisecond && residue <= p/4 {
			t.Errorf("timers that fire %s late look like a precision of %s, the latest %s after its tick", late, p, residue)
		}
	}
}

func TestPlacesOfAGroupAreJudged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		offsets admin.QueueOffsets
		want    Verdict
		words   string
	}{
		"nothing was ever sent":                {admin.QueueOffsets{Min: 0, Max: 0, Committed: -1}, Sound, "0 messages"},
		"fresh group, young topic":             {admin.QueueOffsets{Min: 0, Max: 9, Committed: -1}, Sound, "the group is new"},
		"fresh group, aged topic":              {admin.QueueOffsets{Min: 5, Max: 9, Committed: -1}, Wrong, "starts at the end"},
		"in the middle":                        {admin.QueueOffsets{Min: 0, Max: 9, Committed: 4}, Sound, "5 messages"},
		"at the end":                           {admin.QueueOffsets{Min: 9, Max: 9, Committed: 9}, Sound, "0 messages"},
		"what it was to receive is gone":       {admin.QueueOffsets{Min: 5, Max: 9, Committed: 4}, Wrong, "lost messages up to 5"},
		"beyond the end of a topic made again": {admin.QueueOffsets{Min: 0, Max: 3, Committed: 9}, Wrong, "misses"},
	} {
		c.offsets.Queue = 3
		got := judgeOffsets([]admin.QueueOffsets{{Queue: 0, Committed: 0}, c.offsets}, "reset")
		if got.verdict != c.want || !strings.Contains(got.found, c.words) {
			t.Errorf("%s: %q, %s; want %q, and %q", name, got.verdict, got.found, c.want, c.words)
		}
	}
}

// Two doctors at the same topic take each other's messages. Neither may call the broker wrong for that.
func TestTwoDoctorsAtOnceDoNotAccuseTheBroker(t *testing.T) {
	t.Parallel()
	cfg, _ := onEmbedded(t, lapsetest.WithPollLimit(time.Second))
	cfg.Timeout = 10 * time.Second
	for _, name := range []string{"one", "another"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantWrong(t, look(t, cfg, "broker.timed_message", "broker.max_delay"), nil)
		})
	}
}

// age makes the topic lose its first messages: it fills the first file of the commit log, makes that look older than files are kept, and
// waits until it is gone. What else was in the file is gone too.
func age(t *testing.T, s *stacktest.Stack, cfg DoctorConfig) {
	t.Helper()
	p, err := rmq.NewProbe(cfg.RocketMQ)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	v, err := p.Visit(t.Context(), cfg.Group, cfg.Topic)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Leave()
	queues := func(holds func(admin.QueueOffsets) bool) bool {
		offsets, err := s.Broker.Admin.Offsets(t.Context(), cfg.Group, cfg.Topic)
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(offsets, func(o admin.QueueOffsets) bool { return !holds(o) })
	}
	send := func(body string) {
		if _, err := v.Send(t.Context(), body, time.Now().Add(-time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	// A queue whose only message lay in a younger file would never age.
	for range 1000 {
		if send("old"); queues(func(o admin.QueueOffsets) bool { return o.Max > 0 }) {
			break
		}
	}
	log := filepath.Join(s.Store(), "commitlog")
	big := strings.Repeat("x", 4<<20-64<<10)
	for n := 0; ; n++ {
		files, err := os.ReadDir(log)
		if err != nil {
			t.Fatal(err)
		}
		if len(files) >= 3 { // the newest is made ahead of its use: the first is full
			break
		}
		if n == 64 {
			t.Fatalf("%d files in the commit log after %d messages of %d bytes", len(files), n, len(big))
		}
		send(big)
	}
	old := time.Now().Add(-10 * 24 * time.Hour)
	if err := os.Chtimes(filepath.Join(log, "00000000000000000000"), old, old); err != nil {
		t.Fatal(err)
	}
	if err := s.Broker.Admin.DeleteExpiredFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(2 * time.Minute)
	for !queues(func(o admin.QueueOffsets) bool { return o.Min > 0 }) {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("the topic has not lost its first messages after two minutes")
		}
	}
}

func TestSettingsAndPlacesOnABrokerOfItsOwn(t *testing.T) {
	t.Parallel()
	// A broker of RocketMQ's own precision that writes late, with a primary and a replica beside it: servers to be broken.
	s := stacktest.Private(t, stacktest.Options{
		Parts:       []stacktest.Part{stacktest.MySQL, stacktest.Replica, stacktest.NameServer, stacktest.BrokerProxy},
		PrecisionMs: 1000,
		Env:         []string{"STACK_FLUSH_DISK_TYPE=ASYNC_FLUSH"},
	})
	t.Run("broker", func(t *testing.T) {
		t.Parallel()
		cfg := onRealBroker(t, s.Broker)
		// A busy machine may make it impossible to measure; what is measured is not another precision.
		measured := false
		for range 6 {
			found := look(t, cfg, "broker.")
			if measured = found["broker.precision"].Verdict != NotChecked; measured {
				wantWrong(t, found, map[string]string{"broker.precision": "the broker's tick is 1s (measured"})
				break
			}
		}
		if !measured {
			t.Error("the precision could not be measured in six tries")
		}
		cfg.AdminEndpoint = s.Getenv("LAPSE_TEST_BROKER_ADMIN")
		wantWrong(t, look(t, cfg, "broker.settings", "broker.retention", "broker.precision", "broker.offsets"), map[string]string{
			"broker.settings": `flushDiskType="ASYNC_FLUSH"`, "broker.precision": "timerPrecisionMs",
		})
		// A broker takes a minute to let go of a file, so the daily run has TestPlacesOfAGroupAreJudged alone.
		if os.Getenv("LAPSE_TEST_FULL") != "1" {
			return
		}
		age(t, s, cfg)
		group := cfg
		group.Group = s.Broker.NewGroup(t, leastRetries)
		wantWrong(t, look(t, group, "broker.offsets"), map[string]string{"broker.offsets": "it starts at the end"})
		if err := s.Broker.Admin.ResetOffset(t.Context(), group.Group, group.Topic, time.Time{}); err != nil { // what the doctor advises
			t.Fatal(err)
		}
		wantSound(t, look(t, group, "broker.offsets"), "broker.offsets")
	})
	t.Run("primary", func(t *testing.T) {
		t.Parallel()
		breakPrimary(t, s)
	})
	t.Run("replica", func(t *testing.T) {
		t.Parallel()
		breakReplica(t, s)
	})
}
