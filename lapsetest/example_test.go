package lapsetest_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/lapsetest"
)

// Half an hour passes at once. In a test, lapsetest.Start(t) takes the place of New
// and Close.
func Example() {
	clock := lapsetest.NewClock(time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC))
	b, err := lapsetest.New(lapsetest.WithClock(clock))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer b.Close()
	b.CreateTopic("order-timeout", lapsetest.Delay, 8)
	b.CreateGroup("order-timeout-cg", 16)

	// The code under test; here the official client by itself.
	golang.EnableSsl = false
	config := &golang.Config{Endpoint: b.Endpoint(), ConsumerGroup: "order-timeout-cg", Credentials: &credentials.SessionCredentials{}}
	producer, err := golang.NewProducer(config, golang.WithTopics("order-timeout"))
	if err == nil {
		err = producer.Start()
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = producer.GracefulStop() }()
	consumer, err := golang.NewSimpleConsumer(config,
		golang.WithSimpleAwaitDuration(5*time.Second),
		golang.WithSimpleSubscriptionExpressions(map[string]*golang.FilterExpression{"order-timeout": golang.SUB_ALL}))
	if err == nil {
		err = consumer.Start()
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = consumer.GracefulStop() }()

	ctx := context.Background()
	m := &golang.Message{Topic: "order-timeout", Body: []byte("order 17")}
	m.SetDelayTimestamp(clock.Now().Add(30 * time.Minute))
	if _, err := producer.Send(ctx, m); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("pending:", len(b.Pending("order-timeout")))

	clock.Advance(30 * time.Minute)
	messages, err := consumer.Receive(ctx, 32, 10*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range messages {
		fmt.Println("received:", string(m.GetBody()))
		if err := consumer.Ack(ctx, m); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println("acked:", len(b.Acked("order-timeout-cg")))
	// Output:
	// pending: 1
	// received: order 17
	// acked: 1
}

// A control function that refuses every second send, and lets everything else be.
func ExampleBroker_Control() {
	b, err := lapsetest.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer b.Close()
	var n atomic.Int64 // requests come from many goroutines
	remove := b.Control(lapsetest.SendMessage, func(context.Context, any) (any, error, bool) {
		return v2.Code_TOO_MANY_REQUESTS, nil, n.Add(1)%2 == 0
	})
	defer remove()
}
