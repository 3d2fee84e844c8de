package lapsetest_test

import (
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/lapse-orders/lapse/lapsetest"
)

// BenchmarkSend tells whether the endpoint, rather than the code under test, bounds
// what a load test can send.
func BenchmarkSend(b *testing.B) {
	s := lapsetest.Start(b)
	s.CreateTopic(topic, lapsetest.Delay, 8)
	c, err := grpc.NewClient(s.Endpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			b.Error(err)
		}
	}()
	api := v2.NewMessagingServiceClient(c)
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			out, err := api.SendMessage(b.Context(), &v2.SendMessageRequest{Messages: []*v2.Message{newMessage(topic, "body", time.Now().Add(time.Hour))}})
			if err != nil || out.GetStatus().GetCode() != v2.Code_OK {
				b.Errorf("send: %v, %v", out.GetStatus(), err)
				return
			}
		}
	})
}
