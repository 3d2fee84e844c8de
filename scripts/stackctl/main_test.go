package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
)

func TestQueuesThatAGroupWouldReadWrongly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		offsets admin.QueueOffsets
		want    bool
	}{
		"nothing was ever sent":                 {admin.QueueOffsets{Min: 0, Max: 0, Committed: -1}, false},
		"fresh group, young topic":              {admin.QueueOffsets{Min: 0, Max: 9, Committed: -1}, true},
		"fresh group, aged topic":               {admin.QueueOffsets{Min: 5, Max: 9, Committed: -1}, true},
		"fresh group, aged topic that is empty": {admin.QueueOffsets{Min: 9, Max: 9, Committed: -1}, true},
		"in the middle":                         {admin.QueueOffsets{Min: 0, Max: 9, Committed: 4}, false},
		"at the end":                            {admin.QueueOffsets{Min: 0, Max: 9, Committed: 9}, false},
		"beyond the end of a restored topic":    {admin.QueueOffsets{Min: 0, Max: 3, Committed: 9}, true},
		"beyond the end of a wiped topic":       {admin.QueueOffsets{Min: 0, Max: 0, Committed: 9}, true},
	} {
		c.offsets.Queue = 3
		got := unsafeQueues([]admin.QueueOffsets{{Queue: 0, Committed: -1}, c.offsets})
		if c.want != slices.Equal(got, []int{3}) || !c.want && len(got) != 0 {
			t.Errorf("%s: queues %v to be reset, want queue 3: %v", name, got, c.want)
		}
	}
}

func TestFreshGroupStartsAtTheOldestMessage(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	topic, group := broker.NewTopic(t, admin.Normal), broker.NewGroup(t, 3)
	send(t, broker.Endpoints, topic, 40)

	for range 2 { // the second time there is nothing to do
		if err := safeOffsets(ctx, broker.Admin, group, topic); err != nil {
			t.Fatal(err)
		}
		offsets, err := broker.Admin.Offsets(ctx, group, topic)
		if err != nil {
			t.Fatal(err)
		}
		var sent int64
		for _, o := range offsets {
			sent += o.Max - o.Min
			if o.Max > 0 && o.Committed != o.Min {
				t.Errorf("queue %d: the group starts at %d, the oldest message is %d", o.Queue, o.Committed, o.Min)
			}
		}
		if sent != 40 {
			t.Fatalf("%d messages in the topic, want 40", sent)
		}
	}
}

func TestMissingTopicAndGroupAreCreated(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	topic, group := broker.NewTopic(t, admin.Delay), broker.NewGroup(t, 1)
	if err := broker.Admin.DeleteTopic(ctx, topic); err != nil {
		t.Fatal(err)
	}
	if err := broker.Admin.DeleteGroup(ctx, group); err != nil {
		t.Fatal(err)
	}
	if err := ensure(ctx, broker.Admin, topic, group); err != nil {
		t.Fatal(err)
	}
	gotTopic, err := broker.Admin.Topic(ctx, topic)
	if want := (admin.Topic{Name: topic, Type: admin.Delay, Queues: 8}); err != nil || gotTopic != want {
		t.Errorf("got %+v, %v, want %+v", gotTopic, err, want)
	}
	gotGroup, err := broker.Admin.Group(ctx, group)
	if want := (admin.Group{Name: group, Retries: 16}); err != nil || gotGroup != want {
		t.Errorf("got %+v, %v, want %+v", gotGroup, err, want)
	}
	// The reader of dead letters gets what would never reach it with 16 retries, and is put right where it has them.
	reader := group + "-dlq"
	t.Cleanup(func() {
		if err := broker.Admin.DeleteGroup(context.Background(), reader); err != nil {
			t.Errorf("delete %s: %v", reader, err)
		}
	})
	if err := broker.Admin.CreateGroup(ctx, reader, 16); err != nil {
		t.Fatal(err)
	}
	if err := ensure(ctx, broker.Admin, topic, group); err != nil {
		t.Fatal(err)
	}
	if got, err := broker.Admin.Group(ctx, reader); err != nil || got.Retries != deadLetterRetries {
		t.Errorf("got %+v, %v, want %d retries", got, err, deadLetterRetries)
	}
}

func TestTopicOfAnotherTypeIsRefusedAndKept(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	topic, group := broker.NewTopic(t, admin.Normal), broker.NewGroup(t, 1)
	if err := ensure(t.Context(), broker.Admin, topic, group); err == nil || !strings.Contains(err.Error(), "of type NORMAL, want DELAY") {
		t.Errorf("got %v, want a refusal naming both types", err)
	}
	if got, err := broker.Admin.Topic(t.Context(), topic); err != nil || got.Type != admin.Normal {
		t.Errorf("afterwards %+v, %v, want it as it was", got, err)
	}
}

func TestTopicOfEventsIsMadeAndOneForTimedMessagesRefused(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	topic := broker.NewTopic(t, admin.Normal)
	if err := broker.Admin.DeleteTopic(t.Context(), topic); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := ensureTopic(t.Context(), broker.Admin, topic, admin.Normal, 8); err != nil {
			t.Fatal(err)
		}
		if got, err := broker.Admin.Topic(t.Context(), topic); err != nil || got != (admin.Topic{Name: topic, Type: admin.Normal, Queues: 8}) {
			t.Errorf("the topic is %+v, %v", got, err)
		}
	}
	if err := ensureTopic(t.Context(), broker.Admin, broker.NewTopic(t, admin.Delay), admin.Normal, 8); err == nil || !strings.Contains(err.Error(), "of type DELAY, want NORMAL") {
		t.Errorf("a topic of type DELAY: %v", err)
	}
}

func TestRouteSaysWhetherTimedMessagesAreTaken(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	conn := dial(t, broker.Endpoints)
	for kind, want := range map[admin.TopicType]string{admin.Delay: "", admin.Normal: "accepts NORMAL, want DELAY"} {
		err := delayRoute(t.Context(), conn, broker.Endpoints, broker.NewTopic(t, kind))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", kind, err, want)
		}
	}
	if err := delayRoute(t.Context(), conn, broker.Endpoints, "never-made"); err == nil || !strings.Contains(err.Error(), "TOPIC_NOT_FOUND") {
		t.Errorf("unknown topic: %v, want TOPIC_NOT_FOUND", err)
	}
}

func TestSettingsThatAreNotInForceAreNoticed(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	config, err := broker.Admin.BrokerConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := checkConfig(t.Context(), broker.Admin, config["timerPrecisionMs"]); err != nil {
		t.Error(err)
	}
	if err := checkConfig(t.Context(), broker.Admin, "250"); err == nil || !strings.Contains(err.Error(), `want "250"`) {
		t.Errorf("another precision: %v", err)
	}
}

func dial(t *testing.T, endpoints string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(endpoints, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func send(t *testing.T, endpoints, topic string, n int) {
	t.Helper()
	client := v2.NewMessagingServiceClient(dial(t, endpoints))
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-mq-client-id", "lapse-stack-test", "x-mq-language", "GO", "x-mq-protocol", "v2", "x-mq-client-version", "5.1.4")
	for i := range n {
		if err := sendOne(ctx, client, topic, fmt.Sprintf("%s-%d", topic, i)); err != nil {
			t.Fatal(err)
		}
	}
}

func sendOne(ctx context.Context, client v2.MessagingServiceClient, topic, id string) error {
	return sendMessage(ctx, client, topic, id, []byte("x"))
}

func sendMessage(ctx context.Context, client v2.MessagingServiceClient, topic, id string, body []byte) error {
	answer, err := client.SendMessage(ctx, &v2.SendMessageRequest{Messages: []*v2.Message{{
		Topic: &v2.Resource{Name: topic},
		SystemProperties: &v2.SystemProperties{
			MessageId:     id,
			MessageType:   v2.MessageType_NORMAL,
			BodyEncoding:  v2.Encoding_IDENTITY,
			BornTimestamp: timestamppb.Now(),
			BornHost:      "localhost",
		},
		Body: body,
	}}})
	if err != nil {
		return err
	}
	if code := answer.GetStatus().GetCode(); code != v2.Code_OK {
		return fmt.Errorf("send: %s: %s", code, answer.GetStatus().GetMessage())
	}
	return nil
}

func TestTheDoctorsTopicAndGroupAreCreated(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	ctx := t.Context()
	topic, group := broker.NewTopic(t, admin.Delay), broker.NewGroup(t, 1)
	if err := broker.Admin.DeleteTopic(ctx, topic); err != nil {
		t.Fatal(err)
	}
	if err := broker.Admin.DeleteGroup(ctx, group); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to do
		if err := ensureDoctor(ctx, broker.Admin, topic, group); err != nil {
			t.Fatal(err)
		}
		gotTopic, err := broker.Admin.Topic(ctx, topic)
		if want := (admin.Topic{Name: topic, Type: admin.Delay, Queues: 2}); err != nil || gotTopic != want {
			t.Errorf("got %+v, %v, want %+v", gotTopic, err, want)
		}
		gotGroup, err := broker.Admin.Group(ctx, group)
		if want := (admin.Group{Name: group, Retries: 16}); err != nil || gotGroup != want {
			t.Errorf("got %+v, %v, want %+v", gotGroup, err, want)
		}
	}
}
