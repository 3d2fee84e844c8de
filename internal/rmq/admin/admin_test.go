package admin_test

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
)

func TestTopicIsCreatedChangedAndDeleted(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	name := broker.NewTopic(t, admin.Delay)

	want := admin.Topic{Name: name, Type: admin.Delay, Queues: 8}
	got, err := broker.Admin.Topic(ctx, name)
	if err != nil || got != want {
		t.Errorf("after creating: %+v, %v, want %+v", got, err, want)
	}
	if err := broker.Admin.CreateTopic(ctx, name, admin.Delay, 12); err != nil {
		t.Fatal(err)
	}
	want.Queues = 12
	if got, err = broker.Admin.Topic(ctx, name); err != nil || got != want {
		t.Errorf("after changing: %+v, %v, want %+v", got, err, want)
	}
	// Deleting what is not there is what a test's cleanup does after the test itself.
	for range 2 {
		if err := broker.Admin.DeleteTopic(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if got, err = broker.Admin.Topic(ctx, name); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("after deleting: %+v, %v, want ErrNotFound", got, err)
	}
}

func TestTopicOfUnknownTypeIsRefused(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	// mqadmin exits 0 here.
	err := broker.Admin.CreateTopic(t.Context(), "misspelt-"+strings.ToLower(rand.Text()), "Delay", 8)
	var refused *admin.Error
	if !errors.As(err, &refused) {
		t.Errorf("got %v, want *admin.Error", err)
	}
}

func TestGroupIsCreatedChangedAndDeleted(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	name := broker.NewGroup(t, 3)

	want := admin.Group{Name: name, Retries: 3}
	got, err := broker.Admin.Group(ctx, name)
	if err != nil || got != want {
		t.Errorf("after creating: %+v, %v, want %+v", got, err, want)
	}
	if err := broker.Admin.CreateGroup(ctx, name, 16); err != nil {
		t.Fatal(err)
	}
	want.Retries = 16
	if got, err = broker.Admin.Group(ctx, name); err != nil || got != want {
		t.Errorf("after changing: %+v, %v, want %+v", got, err, want)
	}
	for range 2 {
		if err := broker.Admin.DeleteGroup(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if got, err = broker.Admin.Group(ctx, name); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("after deleting: %+v, %v, want ErrNotFound", got, err)
	}
}

func TestResetGivesAGroupItsPlaceInEveryQueue(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	topic, group := broker.NewTopic(t, admin.Delay), broker.NewGroup(t, 3)

	committed := func() []int64 {
		t.Helper()
		offsets, err := broker.Admin.Offsets(ctx, group, topic)
		if err != nil {
			t.Fatal(err)
		}
		var all []int64
		for i, o := range offsets {
			if o.Queue != i || o.Min != 0 || o.Max != 0 {
				t.Errorf("queue %d of an empty topic: %+v", i, o)
			}
			all = append(all, o.Committed)
		}
		return all
	}
	if got, want := committed(), []int64{-1, -1, -1, -1, -1, -1, -1, -1}; !slices.Equal(got, want) {
		t.Errorf("fresh group: %v, want %v", got, want)
	}
	if err := broker.Admin.ResetOffset(ctx, group, topic, time.Time{}, 2, 5); err != nil {
		t.Fatal(err)
	}
	if got, want := committed(), []int64{-1, -1, 0, -1, -1, 0, -1, -1}; !slices.Equal(got, want) {
		t.Errorf("queues 2 and 5 reset: %v, want %v", got, want)
	}
	if err := broker.Admin.ResetOffset(ctx, group, topic, time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	if got, want := committed(), make([]int64, 8); !slices.Equal(got, want) {
		t.Errorf("all reset: %v, want %v", got, want)
	}
	if err := broker.Admin.ResetOffset(ctx, "nobody-"+strings.ToLower(rand.Text()), topic, time.Time{}); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("unknown group: %v, want ErrNotFound", err)
	}
}

func TestBrokerHasTheShippedSettingsInForce(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	config, err := broker.Admin.BrokerConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Each of these has a default that loses messages or makes topics appear by accident.
	for key, want := range map[string]string{
		"timerEnableRetryUntilSuccess": "true",
		"flushDiskType":                "SYNC_FLUSH",
		"cleanFileForciblyEnable":      "false",
		"autoCreateTopicEnable":        "false",
		"autoCreateSubscriptionGroup":  "false",
		"diskMaxUsedSpaceRatio":        "70",
	} {
		if config[key] != want {
			t.Errorf("%s = %q, want %q", key, config[key], want)
		}
	}
	info, err := broker.Admin.RuntimeInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info["brokerVersionDesc"] != "V5_5_0" || info["timerReadBehind"] == "" {
		t.Errorf("version %q, timerReadBehind %q, want V5_5_0 and a number", info["brokerVersionDesc"], info["timerReadBehind"])
	}
}

func TestNothingListening(t *testing.T) {
	t.Parallel()
	l := listen(t)
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := admin.New(addr).Topic(t.Context(), "order-timeout")
	if err == nil || !strings.Contains(err.Error(), "topic order-timeout on "+addr) {
		t.Errorf("got %v, want an error naming topic and address", err)
	}
}

func TestServerThatNeverAnswersIsLeftWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	l := listen(t)
	asked := make(chan struct{})
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close() //nolint:errcheck // a test's server
		_, _ = conn.Read(make([]byte, 1))
		close(asked)
		_, _ = io.Copy(io.Discard, conn) // until the client goes
	}()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := admin.New(l.Addr().String()).BrokerConfig(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

// A broker sends requests of its own to its clients on the same connection, and an answer to somebody else's request must not be taken.
func TestOnlyTheAnswerToOurRequestCounts(t *testing.T) {
	t.Parallel()
	l := listen(t)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close() //nolint:errcheck // a test's server
		opaque, err := readOpaque(conn)
		if err != nil {
			t.Error(err)
			return
		}
		frames := slices.Concat(
			frame(map[string]any{"code": 40, "opaque": opaque, "flag": 0}, "their=request"),
			frame(map[string]any{"code": 0, "opaque": opaque + 1000, "flag": 1}, "other=answer"),
			frame(map[string]any{"code": 0, "opaque": opaque, "flag": 1}, "our=answer\nwith=a=sign\n"),
		)
		if _, err := conn.Write(frames); err != nil {
			t.Error(err)
		}
	}()
	config, err := admin.New(l.Addr().String()).BrokerConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(config) != 2 || config["our"] != "answer" || config["with"] != "a=sign" {
		t.Errorf("got %v", config)
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func frame(header map[string]any, body string) []byte {
	h, err := json.Marshal(header)
	if err != nil {
		panic(err)
	}
	f := binary.BigEndian.AppendUint32(nil, uint32(4+len(h)+len(body)))
	f = binary.BigEndian.AppendUint32(f, uint32(len(h)))
	return slices.Concat(f, h, []byte(body))
}

func readOpaque(r io.Reader) (int, error) {
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return 0, err
	}
	rest := make([]byte, binary.BigEndian.Uint32(prefix[:4])-4)
	if _, err := io.ReadFull(r, rest); err != nil {
		return 0, err
	}
	var header struct {
		Opaque int `json:"opaque"`
	}
	err := json.Unmarshal(rest[:binary.BigEndian.Uint32(prefix[4:])], &header)
	return header.Opaque, err
}
